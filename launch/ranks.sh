#!/usr/bin/env bash
# run_ranks: torchrun as a child, signals passed on, and an exit code that tells a clean drain, a refusal and a failure apart.
# Sourced by serve.sh and multinode.sh after venv.sh.

# If the script is killed, what it waits for must not live on: the kernel sends it SIGTERM.
die_with_parent=()
if command -v setpriv >/dev/null; then die_with_parent=(setpriv --pdeathsig TERM); fi

# Ranks report by a file that they write as their last act: OUTCOME/ATTEMPT.LOCAL_RANK is a clean end, with .refused added
# a refusal (wrong options, a model that cannot be served). Prints the number of the last attempt.
last_attempt() { # last_attempt OUTCOME
    find "$1" -maxdepth 1 -name '[0-9]*.[0-9]*' -exec basename {} \; | sort -n | tail -n 1 | cut -d . -f 1
}

# True when the last attempt was refused. To torchrun its ranks ended well, or it would start them again (--max-restarts).
refused() { # refused OUTCOME
    [ -n "$(find "$1" -name "$(last_attempt "$1").*.refused" -print -quit)" ] # no pattern with $1 in it: TMPDIR may have brackets
}

# True when torchrun ended because it was signalled and each of its ranks reported a clean end. Then, and only then, its
# exit code 1 is no failure. torchrun itself writes down what ended it (TORCHELASTIC_ERROR_FILE).
drained_cleanly() { # drained_cleanly OUTCOME NPROC
    local outcome=$1 nproc=$2 attempt local_rank
    grep -qs '"SignalException: ' "$outcome/torchrun.json" || return 1
    attempt=$(last_attempt "$outcome")
    for ((local_rank = 0; local_rank < nproc; local_rank++)); do
        [ -e "$outcome/$attempt.$local_rank" ] || return 1
    done
}

# The first signal goes to the ranks, which drain and exit 0, so that torchrun ends normally. A second one goes to
# torchrun, which kills after 30 s what has not ended.
pass_signal_on() {
    if [ "$signals" -eq 0 ] && pkill -TERM -P "$torchrun"; then
        say "stopping: running requests may finish (again to insist)"
    else
        kill -TERM "$torchrun" 2>/dev/null || true
    fi
    signals=$((signals + 1))
}

run_ranks() { # run_ranks NPROC TORCHRUN_ARGUMENT...: returns 0 after a clean end or drain, 2 after a refusal, else torchrun's exit code
    local nproc=$1 outcome code cores torchrun signals=0
    shift
    # Fewer files than that, and torchrun or its ranks end with a traceback, or abort.
    [ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 64 ] || ulimit -n 64 2>/dev/null ||
        die "only $(ulimit -Hn) files may be open here; torchrun and its ranks need 64 or more: raise the limit (ulimit -Hn, LimitNOFILE=)"
    outcome=$(mktemp -d "${TMPDIR:-/tmp}/spmd_serve.XXXXXX") || die "no folder can be made in ${TMPDIR:-/tmp}; set TMPDIR"
    if [ -z "${OMP_NUM_THREADS:-}" ]; then # else torchrun warns and sets 1
        cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) # nproc minds a batch system's limits
        export OMP_NUM_THREADS=$((cores > nproc ? cores / nproc : 1))
    fi
    trap pass_signal_on TERM INT HUP
    trap '' PIPE # whoever read our words has gone, as with `| grep -m1 ready`: that must not end us in the midst of a drain
    # torchrun makes a folder for logs in TMPDIR at each start, and leaves it there. Whoever asks it for logs keeps them.
    if [ -z "${PET_LOG_DIR:-}${PET_REDIRECTS:-}${PET_TEE:-}" ]; then export PET_LOG_DIR=$outcome/torchrun; fi
    set -m # a process group of its own: Ctrl-C in a terminal reaches this script alone, which passes it on
    SPMD_SERVE_OUTCOME_DIR=$outcome TORCHELASTIC_ERROR_FILE=$outcome/torchrun.json \
        "${die_with_parent[@]}" "$PYTHON" -m torch.distributed.run --nproc-per-node="$nproc" "$@" &
    torchrun=$!
    set +m
    while :; do # a trapped signal ends wait, not torchrun
        code=0
        wait "$torchrun" || code=$?
        kill -0 "$torchrun" 2>/dev/null || break
    done
    if [ "$code" -gt 128 ]; then # that may be the signal's: torchrun ended before the loop came to look
        code=0
        wait "$torchrun" || code=$? # at once, its own: the shell remembers it
    fi
    if [ "$code" = -1 ]; then # but for bash 5.2 where signal and end came at the same moment. torchrun writes down why it fails
        code=0
        if [ -e "$outcome/torchrun.json" ]; then code=1; fi
    fi
    trap - TERM INT HUP
    if [ "$code" -eq 143 ] && [ "$signals" -gt 0 ]; then
        code=0 # our SIGTERM has ended it, which it only lets happen before it starts the ranks
    elif [ "$code" -ne 0 ] && drained_cleanly "$outcome" "$nproc"; then
        say "torchrun was signalled and all $nproc ranks ended cleanly: exit 0 (its traceback above is its way to say so)"
        code=0
    elif [ "$code" -eq 0 ] && refused "$outcome"; then
        code=2
    fi
    rm -rf "$outcome"
    return "$code"
}
