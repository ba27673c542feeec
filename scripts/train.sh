#!/usr/bin/env bash
# Sets itself up, then trains what a configuration (a path from the repository's root) describes.
#   bash scripts/train.sh CONFIG [key=value ...]      any key of the config, such as train.iterations=2
#   bash scripts/train.sh CONFIG --resume runs/NAME   continues a run; its own config replaces CONFIG
set -euo pipefail
config=${1:?"name a configuration, such as configs/libero_ppo.yaml"}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
case " $* " in *" --resume"*) ;; *) set -- "$config" "$@" ;; esac
exec .venv/bin/vla-rl train "$@"
