#!/usr/bin/env bash
# Pictures of what people see (report, README, panel, site), into docs/assets/screens, and axe's check of accessibility.
#   bash scripts/screenshots.sh RUN          RUN: a finished run with report.html; .venv and site/ must exist
# Needs Chromium (apt-get install chromium; CHROMIUM names another). Makes .venv-screenshots once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly venv=.venv-screenshots
readonly stamp=$venv/complete # the hash of the list, written last
if ! sha256sum --status -c "$stamp" 2>/dev/null; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-screenshots.txt
    sha256sum requirements-screenshots.txt >"$stamp"
fi
exec "$venv/bin/python" scripts/screenshots.py "$@"
