#!/usr/bin/env bash
# Asks a database of known vulnerabilities about every package of requirements.txt, by pip-audit in an environment of
# its own. Says how many packages could be asked about. Exit status 0: none is known, or nothing could be asked (no
# network); 1: some are, and they are listed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
home=${VLA_RL_CACHE:-$HOME/.cache/vla_rl}/audit
mkdir -p "$home"
[ -x "$home/bin/pip" ] || "${PYTHON:-python3}" -m venv "$home" >"$home/errors.txt" 2>&1 || true
if ! "$home/bin/pip" install --quiet --disable-pip-version-check --timeout 15 --retries 1 pip-audit 2>"$home/errors.txt"; then
    echo "audit: pip-audit cannot be installed; nothing was asked"
    exit 0
fi
rm -f "$home/report.json"
"$home/bin/pip-audit" --no-deps --disable-pip --timeout 15 --progress-spinner off --format json \
    -r requirements.txt >"$home/report.json" 2>"$home/errors.txt" || true # its status is 1 also without an answer
"$home/bin/python" - "$home" <<'PYTHON'
import json
import pathlib
import sys

home = pathlib.Path(sys.argv[1])
try:
    packages = json.loads((home / "report.json").read_text())["dependencies"]
except (ValueError, KeyError):
    last = ((home / "errors.txt").read_text().splitlines() or ["no answer"])[-1]
    sys.exit(print(f"audit: the database did not answer ({last[:200]}); nothing is known"))
asked = [package for package in packages if "skip_reason" not in package]
found = [(package, problem) for package in asked for problem in package["vulns"]]
for package, problem in found:
    print(f"{package['name']} {package['version']}: {problem['id']}, corrected in {', '.join(problem['fix_versions'])}")
print(f"audit: {len(asked)} of {len(packages)} packages could be asked about; {len(found)} known vulnerabilities")
sys.exit(bool(found))
PYTHON
