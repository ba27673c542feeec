#!/usr/bin/env bash
# Builds the site of docs/ into site/ (mkdocs.yml), strictly: a dead link, a page that is in no menu or a name without a
# docstring ends it. Makes .venv-docs once, from requirements-docs.txt. site/index.html needs neither server nor network.
#   bash scripts/build_docs.sh [ARGUMENTS OF mkdocs build]      PYTHON=/path/to/python3 names the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/tool_environment.sh docs
export NO_MKDOCS_2_WARNING=1 # about another program, in each build
exec .venv-docs/bin/python -m mkdocs build --strict "$@"
