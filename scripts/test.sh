#!/usr/bin/env bash
# Sets itself up, then runs ruff, mypy and pytest; a failure of one does not stop the others.
#   bash scripts/test.sh                     # everything
#   bash scripts/test.sh PYTEST-ARGUMENTS    # only what these select, for example -m "not slow"
#   bash scripts/test.sh --no-system ...     # never installs system packages (as root on Debian, it would)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = --no-system ]; then
    export VLA_RL_NO_SYSTEM=1
    shift
fi
bash scripts/setup.sh --test
status=0

check() {
    echo "== $*"
    .venv/bin/python -m "$@" || { status=1 && echo "== failed: $*"; }
}

check ruff check .
check ruff format --check .
check mypy
if [ $# -gt 0 ]; then
    check pytest "$@"
else  # one file per core at a time, then one by one the tests that need the whole machine
    check pytest -n logical --dist loadfile -m "not alone"
    check pytest -m alone
fi
exit $status
