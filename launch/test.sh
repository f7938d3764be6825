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
check types "$PYTHON" -m mypy
check "types of launch/" "$PYTHON" -m mypy launch/*.py
# Most tests wait for servers and timeouts: two files at a time. A file stays with one process, for its servers. In their
# order the files with few long tests come first, and short ones fill the end.
check tests "$PYTHON" -m pytest --numprocesses="${TEST_PROCESSES:-2}" --dist=loadfile --no-loadscope-reorder "$@"
[ "${#failed[@]}" -eq 0 ] || die "failed: ${failed[*]}"
