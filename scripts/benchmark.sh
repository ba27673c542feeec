#!/usr/bin/env bash
# Batches/s across device counts and placement modes, for LIBERO and for ManiSkill, on virtual devices (no GPU needed).
#   bash scripts/benchmark.sh [--devices 1,2,4,8] [--mode all] [--backend simulated] [--iterations N]
# Prints a table for each file in configs/scaling, and writes BENCHMARKS/NAME.{json,csv,png} (BENCHMARKS defaults to
# runs/benchmarks). For other configs or real devices: vla-rl benchmark scaling CONFIG.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
folder=${BENCHMARKS:-runs/benchmarks}
mkdir -p "$folder"
for config in configs/scaling/*.yaml; do
    to=$folder/$(basename "$config" .yaml)
    .venv/bin/vla-rl benchmark scaling "$config" "$@" --json "$to.json" --csv "$to.csv" --output "$to.png"
done
