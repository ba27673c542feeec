#!/usr/bin/env bash
# Makes .venv-NAME from requirements-NAME.txt, for a tool that the project itself does not need; again when the list changes.
#   bash scripts/tool_environment.sh NAME      PYTHON=/path/to/python3 names the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly name=${1:?"name a list, such as docs"}
readonly venv=.venv-$name list=requirements-$name.txt
readonly stamp=$venv/complete # the hash of the list, written last
if ! sha256sum --status -c "$stamp" 2>/dev/null; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$list"
    sha256sum "$list" >"$stamp"
fi
