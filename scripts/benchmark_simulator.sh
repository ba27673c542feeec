#!/usr/bin/env bash
# LIBERO's speed on one core beside hf-libero and LeRobot, both as they come.
#   bash scripts/benchmark_simulator.sh [--rounds N] [--suite NAME] [--json FILE] ...
# LeRobot goes into a folder of its own, .peers, without the dependencies that this environment has already: its own pins
# would replace torch and transformers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
if [ ! -e .peers/complete ]; then
    rm -rf .peers
    .venv/bin/python -m pip install --quiet --no-deps --target .peers -r scripts/peers.txt
    touch .peers/complete
fi
PYTHONPATH=$PWD/.peers exec .venv/bin/vla-rl benchmark simulator libero "$@"
