#!/usr/bin/env bash
# All checks of the project: lint, format, types, tests.
set -euo pipefail
# shellcheck source=launch/venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

case ${1:-} in
    -h | --help)
        cat <<'HELP'
Usage: launch/test.sh [PYTEST ARGUMENT...]

Makes the environment with the test extra if it is missing, then runs ruff check, ruff format --check, mypy --strict and
pytest with the given arguments (default: all tests). Exits non-zero if any of them failed.

HELP
        venv_environment_help
        exit 0
        ;;
esac

ensure_python test
cd "$ROOT"
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
# Many tests wait for servers and timeouts, so three files run at a time, and mypy uses what they leave of the cores. A file
# stays with one process, for its servers. tests/conftest.py puts them into an order: first those that take long.
types_log=$(mktemp)
nice "$PYTHON" -m mypy >"$types_log" 2>&1 &
types=$!
trap '[ -z "$types" ] || kill "$types" || true; rm -f "$types_log"' EXIT
check tests "$PYTHON" -m pytest --numprocesses="${TEST_PROCESSES:-3}" --dist=loadfile --no-loadscope-reorder "$@"
mypy_beside_the_tests() {
    local code=0
    wait "$types" || code=$?
    types=
    cat "$types_log"
    return "$code"
}
check types mypy_beside_the_tests
check "types of launch/" "$PYTHON" -m mypy launch/*.py
[ "${#failed[@]}" -eq 0 ] || die "failed: ${failed[*]}"
