#!/usr/bin/env bash
# LIBERO's speed on one core, compared with unmodified hf-libero and LeRobot.
#   bash scripts/benchmark_simulator.sh [--rounds N] [--suite NAME] [--json FILE] ...
# LeRobot 0.4.4 is installed into a separate folder, .peers, without the dependencies that this environment already has:
# its own pins would replace torch and transformers. Newer releases need Python 3.12:
#   LEROBOT_PYTHON=VENV/bin/python bash scripts/benchmark_simulator.sh ...
# plays all contestants in an environment as scripts/requirements_lerobot_libero.txt describes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -n "${LEROBOT_PYTHON:-}" ]; then
    PYTHONPATH=$PWD HF_HUB_OFFLINE=1 exec "$LEROBOT_PYTHON" -m vla_rl.commands.cli benchmark simulator libero "$@"
fi
bash scripts/setup.sh
if [ ! -e .peers/complete ]; then
    rm -rf .peers
    .venv/bin/python -m pip install --quiet --no-deps --target .peers -r scripts/peers.txt
    touch .peers/complete
fi
PYTHONPATH=$PWD/.peers exec .venv/bin/vla-rl benchmark simulator libero "$@"
