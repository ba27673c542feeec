#!/usr/bin/env bash
# Sets itself up, then trains a small OpenVLA-OFT policy on LIBERO by PPO with a world model; arguments as for train.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" configs/libero_world_model.yaml "$@"
