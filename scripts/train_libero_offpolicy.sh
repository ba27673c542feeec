#!/usr/bin/env bash
# Sets itself up, then trains a small Gaussian policy on LIBERO off-policy, by TD3+BC; arguments as for train.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" configs/libero_offpolicy.yaml "$@"
