#!/usr/bin/env bash
# `vla-rl train` beside TorchRL, RLlib, Stable-Baselines3, gymnasium's AsyncVectorEnv and Sample Factory, in turns.
#   bash scripts/benchmark_peers.sh FOLDER [--blocks N] [--seconds S] [--only NAME] [--json FILE]
# Hours. FOLDER gets an environment for each library, and keeps it; the first call needs a package index.
#   WITH=PATH is a folder of packages that these also see instead of packages of their own: .venv/lib/python3.11/site-packages
#   LIBERO_ASSETS=PATH has LIBERO's original assets; without it all play on the placeholder assets
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ours=${VLA_RL_PYTHON:-$PWD/.venv/bin/python}
folder=$(realpath -m "${1:?the folder for the environments}")
shift
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
for peer in torchrl sb3 rllib gymnasium sample_factory; do
    [ ! -e "$folder/$peer/complete" ] || continue
    rm -rf "${folder:?}/$peer"
    "$ours" -m venv "$folder/$peer"
    own=$folder/$peer/bin/python
    if [ -n "${WITH:-}" ]; then
        realpath "$WITH" >"$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/with.pth"
    else
        "$own" -m pip install --quiet --no-deps -r requirements.txt
    fi
    "$own" -m pip install --quiet --no-deps -r "scripts/peers/requirements_$peer.txt"
    touch "$folder/$peer/complete"
done
PYTHONPATH=$PWD exec "$ours" scripts/benchmark_peers.py "$folder" "$@"
