#!/usr/bin/env bash
# LIBERO's speed on one core, compared with unmodified hf-libero and LeRobot.
#   bash scripts/benchmark_simulator.sh [--rounds N] [--suite NAME] [--json FILE] ...
# LeRobot is installed into a separate folder, .peers, without the dependencies that this environment already has: its
# own pins would replace torch and transformers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
if [ ! -e .peers/complete ]; then
    rm -rf .peers
    .venv/bin/python -m pip install --quiet --no-deps --target .peers -r scripts/peers.txt
    touch .peers/complete
fi
PYTHONPATH=$PWD/.peers exec .venv/bin/vla-rl benchmark simulator libero "$@"
