#!/usr/bin/env bash
# Proves that the wheel works without a checkout: builds it, makes fresh environments, and runs in a folder elsewhere.
#   bash scripts/check_install.sh [FOLDER]     PYTHON=python3.12 names the interpreter; default python3
#   TORCH=torch==2.13.0 is installed first, if it is set, and so decides which build of torch is used
#   WITH=PATH is a folder of packages that both environments also see, such as a torch that is already there
# Writes only into FOLDER (default: a new temporary one), which it leaves. Needs a package index, and libosmesa6 or EGL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
folder=$(realpath -m "${1:-$(mktemp -d -t vla_rl-install-XXXX)}")
mkdir -p "$folder"
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

environment() { # environment NAME: a fresh one, with its Python in $own
    rm -rf "${folder:?}/$1"
    "$python" -m venv "$folder/$1"
    own=$folder/$1/bin/python
    [ -z "${WITH:-}" ] || echo "$WITH" >"$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/with.pth"
}

say "building the wheel"
rm -rf "$folder/source" "$folder/dist"
mkdir "$folder/source"
git ls-files -z | tar --null -T - -c | tar -x -C "$folder/source"
"$python" -m pip wheel --quiet --no-deps -w "$folder/dist" "$folder/source"
rm -rf "$folder/source"
wheel=$(ls "$folder"/dist/vla_rl-*.whl)
say "$(basename "$wheel"): $(($(stat -c %s "$wheel") >> 20)) MiB"

environment training
say "installing it with the extra libero into a fresh $("$own" --version)"
[ -z "${TORCH:-}" ] || "$own" -m pip install --quiet "$TORCH"
"$own" -m pip install --quiet "${wheel}[libero]"
"$own" -m pip install --quiet --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1
say "$("$own" -m pip list --format=freeze | wc -l) packages, $(du -sm "$folder/training" | cut -f 1) MiB"

work=$folder/work
rm -rf "$work"
mkdir "$work"
cd "$work"
"$folder/training/bin/vla-rl" list >list.txt
grep -q "libero_ppo" list.txt
say "vla-rl train libero_ppo, one update of 4 episodes"
"$folder/training/bin/vla-rl" train libero_ppo train.iterations=1 train.batch_episodes=4 train.eval_episodes=0 \
    env.max_episode_steps=16 placement.env_workers=1 log.name=short
test -f runs/short/checkpoints/000001/policy/model.safetensors
say "the API's example"
"$own" - <<'PY'
from vla_rl import evaluate, load_config, load_policy, train

config = load_config("tabletop", {"train.iterations": 1, "train.batch_episodes": 8, "train.eval_episodes": 4,
                                  "train.eval_sampled": False, "placement.envs_per_worker": 4, "log.name": "api"})
result = train(config)
print(result, evaluate(result.run, 4).text(), load_policy(result.run).instructions[:1])
PY

environment libero
say "fast LIBERO by itself, without torch, Ray and DeepSpeed"
"$own" -m pip install --quiet --no-deps "$wheel" -r "$OLDPWD/requirements-libero.txt"
"$own" - <<'PY'
import sys
from envs.libero.dropin import OffScreenRenderEnv, get_benchmark_dict

suite = get_benchmark_dict()["libero_spatial"]()
env = OffScreenRenderEnv(suite.get_task_bddl_file_path(0), camera_heights=64, camera_widths=64)
env.seed(0)
env.reset()
image = env.set_init_state(suite.get_task_init_states(0)[0])["agentview_image"]
heavy = {"torch", "ray", "deepspeed", "transformers"} & set(sys.modules)
assert image.std() > 1 and not heavy, heavy
print("an image", image.shape, "and none of the heavy packages is loaded")

import gymnasium
import envs.gymnasium.registration

vector = gymnasium.make_vec("vla_rl/LiberoSpatial-v0", num_envs=2, image_size=64, tasks=(0,))
seen, info = vector.reset(seed=0)
print(seen["agentview"].shape, info["instruction"][0])
PY
say "$("$own" -m pip list --format=freeze | wc -l) packages, $(du -sm "$folder/libero" | cut -f 1) MiB"
say "all of it works; see $folder"
