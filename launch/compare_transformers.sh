#!/usr/bin/env bash
# Measure this server beside `transformers serve --continuous-batching`, in turns, on this machine's CPU.
set -euo pipefail
self=${BASH_SOURCE[0]}
if [ -L "$self" ]; then self=$(readlink -f "$self"); fi
# shellcheck source=launch/venv.sh
. "$(dirname "$self")/venv.sh"
PEER_VENV=${PEER_VENV:-${VENV%/}-transformers}

usage() {
    cat <<'HELP'
Usage: launch/compare_transformers.sh [OPTION...]

Serves the same model files with both servers, with the same compute type and threads, and prints tokens/s (medians of
three rounds in turns) and their ratios: 16 concurrent requests of 128 prompt and 64 output tokens, and one stream alone.
Options are those of `python -m spmd_serve.bench compare`, for example --dtype bfloat16 or --ranks 2.

HELP
    venv_environment_help
    cat <<'HELP'
  PEER_VENV=DIR the environment of the other server (default: .venv-transformers beside launch/), made when missing with the
                same torch and transformers[serving]
HELP
}

help_if_asked "$@"
ensure_python
if [ ! -x "$PEER_VENV/bin/transformers" ]; then
    torch=$(torch_of "$PYTHON")
    say "making $PEER_VENV with torch $torch and transformers[serving]"
    base=$(find_base_python)
    "$base" -m venv "$PEER_VENV"
    extra_index=()
    if [[ $torch == *+cpu ]]; then extra_index=(--extra-index-url "$CPU_INDEX"); fi
    "$PEER_VENV/bin/python" -m pip install "torch==$torch" 'transformers[serving]>=5' "${extra_index[@]}" ||
        die "pip could not install the other server into $PEER_VENV"
fi
export HF_HUB_OFFLINE=1 # both read local files
exec "$PYTHON" -m spmd_serve.bench compare --peer "$PEER_VENV/bin/transformers" "$@"
