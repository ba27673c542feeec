#!/usr/bin/env bash
# Pictures of what people see (report, README, panel, site), into docs/assets/screens, and axe's check of accessibility.
#   bash scripts/screenshots.sh RUN          RUN: a finished run with report.html; .venv and site/ must exist
# Needs Chromium (apt-get install chromium; CHROMIUM names another). Makes .venv-screenshots once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/tool_environment.sh screenshots
exec .venv-screenshots/bin/python scripts/screenshots.py "$@"
