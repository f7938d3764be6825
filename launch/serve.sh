#!/usr/bin/env bash
# Quick start: make the environment if it is missing, then serve a model with torchrun on this machine.
set -euo pipefail
self=${BASH_SOURCE[0]}
if [ -L "$self" ]; then self=$(readlink -f "$self"); fi
# shellcheck source=launch/venv.sh
. "$(dirname "$self")/venv.sh"
# shellcheck source=launch/ranks.sh
. "$(dirname "$self")/ranks.sh"

usage() {
    cat <<'HELP'
Usage: launch/serve.sh [SERVER OPTION...]

Serves a model on this machine:  torchrun --nproc-per-node=$NPROC -m spmd_serve SERVER OPTION...
Without options it is the small model that comes with the project. Examples:

  launch/serve.sh
  NPROC=4 launch/serve.sh --model Qwen/Qwen3-8B --port 8001

Environment:
  NPROC=N         ranks (default: 2; 1 where there is just one NVIDIA GPU)
  MAX_RESTARTS=N  how often torchrun starts the ranks again after a failure (default: 0)
HELP
    venv_environment_help | tail -n +2
    cat <<'HELP'

Ctrl-C or SIGTERM drains: running requests finish, then the script exits 0. When the server refuses what it is given
(options, model) it exits 2 and is not started again, after another failure it exits with torchrun's code.
HELP
}

case ${1:-} in
    -h | --help)
        usage
        if command -v "${PYTHON:-$VENV/bin/python}" >/dev/null; then
            printf '\nServer options:\n\n'
            cd "$ROOT" && exec "${PYTHON:-$VENV/bin/python}" -m spmd_serve --help
        fi
        printf '\nThe server options are listed here once the environment exists: run launch/venv.sh first.\n'
        exit 0
        ;;
esac

ensure_python
if [ -z "${NPROC:-}" ]; then
    NPROC=2
    if [ "$(gpu_count)" -eq 1 ]; then NPROC=1; fi
fi
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || die "NPROC is '$NPROC'; it must be the number of ranks, 1 or more"
MAX_RESTARTS=${MAX_RESTARTS:-0}
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || die "MAX_RESTARTS is '$MAX_RESTARTS'; it must be a number, 0 or more"
# --standalone: torchrun's store takes a free port, so two servers on one host never meet. Its ranks would look for the store by
# the host's own name, which not every machine's resolver knows. --nnodes: a pod that is one of several has PET_NNODES, and torchrun
# would wait for the others without end.
run_ranks "$NPROC" --standalone --nnodes=1 --local-addr=localhost --max-restarts="$MAX_RESTARTS" -m spmd_serve "$@" || exit $?
