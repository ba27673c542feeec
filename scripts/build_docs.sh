#!/usr/bin/env bash
# Builds the site of docs/ into site/ (mkdocs.yml), strictly: a dead link, a page that is in no menu or a name without a
# docstring ends it. Makes .venv-docs once, from requirements-docs.txt. site/index.html needs neither server nor network.
#   bash scripts/build_docs.sh [ARGUMENTS OF mkdocs build]      PYTHON=/path/to/python3 names the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly venv=.venv-docs
readonly stamp=$venv/complete # the hash of the list, written last
if ! sha256sum --status -c "$stamp" 2>/dev/null; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.txt
    sha256sum requirements-docs.txt >"$stamp"
fi
export NO_MKDOCS_2_WARNING=1 # about another program, in each build
exec "$venv/bin/python" -m mkdocs build --strict "$@"
