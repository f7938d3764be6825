#!/usr/bin/env bash
# All checks of the project: lint, format, types, tests.
set -euo pipefail
self=${BASH_SOURCE[0]}
if [ -L "$self" ]; then self=$(readlink -f "$self"); fi
# shellcheck source=launch/venv.sh
. "$(dirname "$self")/venv.sh"

case ${1:-} in
    -h | --help)
        cat <<'HELP'
Usage: launch/test.sh [PYTEST ARGUMENT...]

Makes the environment with the test extra if it is missing, then runs ruff check, ruff format --check, mypy --strict and
pytest with the given arguments. Without arguments it runs all tests, and the Triton kernels in Triton's interpreter and
through its compiler, neither of which needs a GPU. Exits non-zero if any of them failed.

HELP
        venv_environment_help
        exit 0
        ;;
esac

# Triton, and the numpy that its interpreter wants, in a folder of their own: no other test sees them. Prints the folder.
triton_site() {
    local site=$ROOT/.venv-triton
    if [ ! -e "$site/done" ]; then
        say "fetching Triton for its interpreter"
        if ! "$PYTHON" -m pip install --quiet --no-deps --upgrade --target "$site" triton==3.6.0 'numpy>=2,<2.4' >&2; then
            say "Triton cannot be fetched: its kernels are not tested here"
            return 1
        fi
        touch "$site/done"
    fi
    echo "$site"
}

ensure_python test
cd "$ROOT"
unset PYTHONSAFEPATH # tests start scripts that import what lies beside them
export HF_HUB_OFFLINE=1 # no test may reach for a hub
failed=()
check() { # check NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    say "$name: $*"
    if "$@"; then
        say "$name: ok ($((SECONDS - start)) s)"
    else
        say "$name: FAILED ($((SECONDS - start)) s)"
        failed+=("$name")
    fi
}
check lint "$PYTHON" -m ruff check .
check format "$PYTHON" -m ruff format --check .
# Many tests wait for servers and timeouts, so three files run at a time, and what is beside them uses what they leave of the
# cores. A file stays with one process, for its servers. tests/conftest.py puts them into an order: first those that take long.
logs=$(mktemp -d)
beside=()
trap '[ "${#beside[@]}" -eq 0 ] || kill "${beside[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT
start_beside() { # start_beside NAME COMMAND...: `check NAME finish_beside NAME` later
    local name=$1
    shift
    nice "$@" >"$logs/$name" 2>&1 &
    beside+=("$!")
}
finish_beside() {
    local code=0
    wait "${beside[0]}" || code=$?
    beside=("${beside[@]:1}")
    cat "$logs/$1"
    return "$code"
}
start_beside types "$PYTHON" -m mypy
if [ $# -eq 0 ] && site=$(triton_site); then
    triton_tests() { # triton_tests NAME VARIABLE FILE...
        start_beside "$1" env "$2=1" PYTHONPATH="$site" "$PYTHON" -m pytest -p no:cacheprovider "${@:3}"
    }
    triton_tests kernels TRITON_INTERPRET tests/unit/test_kernels_triton.py tests/unit/test_kernels_filters.py
    triton_tests compilation SPMD_TEST_COMPILE tests/unit/test_kernels_compile.py
fi
check tests "$PYTHON" -m pytest --numprocesses="${TEST_PROCESSES:-3}" --dist=loadfile --no-loadscope-reorder "$@"
check types finish_beside types
if [ -e "$logs/kernels" ]; then
    check kernels finish_beside kernels
    check compilation finish_beside compilation
fi
check "types of launch/" "$PYTHON" -m mypy launch/*.py
[ "${#failed[@]}" -eq 0 ] || die "failed: ${failed[*]}"
