#!/usr/bin/env bash
# Sets itself up, then runs ruff, mypy and pytest, all of them whatever the others say.
#   bash scripts/test.sh                     # everything
#   bash scripts/test.sh PYTEST-ARGUMENTS    # what they select, for example -m "not slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
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
else  # a file at a time on each core, then one by one what needs the machine for itself
    check pytest -n logical --dist loadfile -m "not alone"
    check pytest -m alone
fi
exit $status
