#!/usr/bin/env bash
# Trains on a third-party environment of gymnasium: PandaReach-v3 of panda-gym, rendered in software.
#   bash scripts/train_gymnasium.sh [key=value ...]     such as train.iterations=2
# Its packages go into a folder of their own, .third_party; what they share with this environment is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
if [ ! -e .third_party/complete ]; then
    rm -rf .third_party
    .venv/bin/python -m pip install --quiet --no-deps --target .third_party panda-gym==3.0.7 pybullet==3.2.7
    touch .third_party/complete
fi
PYTHONPATH=$PWD/.third_party${PYTHONPATH:+:$PYTHONPATH} exec .venv/bin/vla-rl train configs/panda_reach.yaml "$@"
