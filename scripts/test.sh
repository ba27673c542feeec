#!/usr/bin/env bash
# Sets itself up, then runs ruff, mypy and pytest, all of them whatever the others say.
#   bash scripts/test.sh [pytest arguments ...]
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
check pytest "$@"
exit $status
