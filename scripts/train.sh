#!/usr/bin/env bash
# Sets itself up, then trains by a configuration; the scripts named train_*.sh each call this with theirs.
#   bash scripts/train.sh CONFIG [key=value ...]           any key of the config, such as train.iterations=2
#   bash scripts/train.sh CONFIG --resume runs/NAME        continues a run, with its own config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
config=("$1")
shift
case " $* " in *" --resume"*) config=() ;; esac
exec .venv/bin/vla-rl train "${config[@]}" "$@"
