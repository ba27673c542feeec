#!/usr/bin/env bash
# Sets itself up, then trains a small OpenVLA-OFT policy on Meta-World by asynchronous PPO.
#   bash scripts/train_metaworld_ppo.sh [key=value ...]      any key of the config, such as train.iterations=2
#   bash scripts/train_metaworld_ppo.sh --resume runs/NAME   continues a run with its own config
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" configs/metaworld_ppo.yaml "$@"
