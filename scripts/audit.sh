#!/usr/bin/env bash
# Asks a database of known vulnerabilities about every package of requirements.txt, by pip-audit in an environment of
# its own. Exit status 0: none is known, or nothing could be asked (no network); 1: some are, and they are listed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
home=${VLA_RL_CACHE:-$HOME/.cache/vla_rl}/audit
[ -x "$home/bin/pip" ] || "${PYTHON:-python3}" -m venv "$home"
if ! "$home/bin/pip" install --quiet --disable-pip-version-check --timeout 15 --retries 1 pip-audit; then
    echo "audit: pip-audit cannot be installed; nothing was asked"
    exit 0
fi
status=0
"$home/bin/pip-audit" --no-deps --disable-pip --timeout 15 --progress-spinner off -r requirements.txt >"$home/report.txt" 2>"$home/errors.txt" ||
    status=$?
cat "$home/report.txt"
if [ "$status" -ne 0 ] && ! grep -q "^Name " "$home/report.txt"; then
    echo "audit: the database did not answer ($(tail -n 1 "$home/errors.txt" | cut -c 1-200)); nothing is known"
    exit 0
fi
exit "$status"
