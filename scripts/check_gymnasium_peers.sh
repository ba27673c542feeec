#!/usr/bin/env bash
# Checks that libraries of others take this project's environments of gymnasium: gymnasium's own checker,
# Stable-Baselines3's, and TorchRL's GymEnv. Minutes; needs a package index.
#   bash scripts/check_gymnasium_peers.sh [FOLDER]     PYTHON=python3.12 names the interpreter; default python3
#   WITH=PATH is a folder of packages that the environment also sees, such as a torch that is already there
# Writes only into FOLDER (default: a new temporary one), which it leaves. This project is found by PYTHONPATH alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-$(mktemp -d -t vla_rl-peers-XXXX)}")
rm -rf "${folder:?}/peers"
"${PYTHON:-python3}" -m venv "$folder/peers"
own=$folder/peers/bin/python
[ -z "${WITH:-}" ] || echo "$WITH" >"$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/with.pth"
# what they share with this project in its own versions; the simulators need no more than these
mapfile -t shared < <(grep -E '^(torch|numpy|gymnasium|pydantic|pillow)==' requirements.txt)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$own" -m pip install --quiet "${shared[@]}" stable-baselines3==2.9.2 torchrl==0.14.1
cd "$folder"
"$own" - <<'PYTHON'
import warnings
from importlib.metadata import version

import gymnasium
import numpy as np

ID = "vla_rl:vla_rl/Tabletop-v0"
print({name: version(name) for name in ("gymnasium", "stable-baselines3", "torchrl", "torch", "numpy")})


def quietly(name, check):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check()
    said = sorted({str(one.message).splitlines()[0][:160] for one in caught})
    print(f"{name}: passed, {len(said)} warnings", *said, sep="\n    ")


def stable_baselines() -> None:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_checker import check_env

    check_env(gymnasium.make(ID, render_mode="rgb_array"))
    env = gymnasium.make(ID, max_episode_steps=8)
    PPO("MultiInputPolicy", env, n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(32)


def torchrl() -> None:
    from torchrl.envs import GymEnv

    env = GymEnv(ID, device="cpu")
    played = env.rollout(5)
    assert played.batch_size[0] == 5, played.batch_size
    assert played["front"].shape == (5, 64, 64, 3), played["front"].shape
    assert np.isfinite(played["observation"].numpy()).all()  # its name for "state"


def own() -> None:
    from gymnasium.utils.env_checker import check_env

    check_env(gymnasium.make(ID, render_mode="rgb_array").unwrapped)


quietly("gymnasium's check_env", own)
quietly("Stable-Baselines3's check_env, and two updates of its PPO", stable_baselines)
quietly("TorchRL's GymEnv, a rollout of 5 steps", torchrl)
PYTHON
echo "all of it works: $folder"
