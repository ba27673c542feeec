#!/usr/bin/env bash
# Checks with the package lerobot itself: data sets that it writes are read and trained on; data sets of runs and
# evaluations are read by it; its policies are evaluated and trained. Minutes on two cores; needs no model hub.
#   bash scripts/check_lerobot.sh LEROBOT_PYTHON [FOLDER]
# LEROBOT_PYTHON: of an environment as scripts/requirements_lerobot.txt describes. What is not lerobot's runs in this
# project's own environment, .venv or $VLA_RL_PYTHON: lerobot wants older transformers.
set -euo pipefail
theirs=${1:?name the Python of an environment with lerobot}
cd "$(dirname "$0")/.."
ours=${VLA_RL_PYTHON:-.venv/bin/python}
work=${2:-$(mktemp -d)}
mkdir -p "$work"
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
small=(train.eval_episodes=0 placement.env_workers=1 placement.envs_per_worker=4 env.max_episode_steps=24)
vla_rl() { "$ours" -m vla_rl.commands.cli "$@"; }

for python in "$ours" "$theirs"; do
    echo "== versions of $python"
    "$python" -c "
from importlib.metadata import PackageNotFoundError, version
for name in ('lerobot', 'torch', 'transformers', 'numpy', 'huggingface_hub', 'pyarrow', 'av', 'ray'):
    try: print(name, version(name))
    except PackageNotFoundError: pass"
done
echo "== a data set that lerobot writes is read, and trained on"
"$theirs" scripts/make_lerobot_twin.py "$work/twin" --episodes 20 --writer lerobot 2> "$work/encoder.log"
"$theirs" scripts/check_lerobot_data.py "$work/twin" 2> "$work/decoder.log"
vla_rl sft configs/tabletop.yaml "sft.demos=[$work/twin]" sft.updates=30 sft.batch=16 "sft.output=$work/policy" "${small[@]}"
echo "== episodes of an evaluation and of a training run are read by lerobot"
vla_rl eval "$work/policy" --config configs/tabletop.yaml --episodes 6 "log.dataset=$work/written" "${small[@]}"
vla_rl train configs/tabletop.yaml "policy.checkpoint=$work/policy" "log.dataset=$work/written" "log.dir=$work/runs" \
    train.iterations=1 train.batch_episodes=4 log.tensorboard=false "${small[@]}"
"$theirs" - "$work/written" <<'EOF' 2> "$work/decoder.log"
import sys
from lerobot.datasets.lerobot_dataset import LeRobotDataset
data = LeRobotDataset("vla_rl/written", root=sys.argv[1])
ends = [data[int(end) - 1] for end in data.meta.episodes["dataset_to_index"]]
assert data.num_episodes >= 10 and all(bool(end["next.done"]) for end in ends)
print(f"lerobot reads {data.num_episodes} episodes, {sum(bool(end['next.success']) for end in ends)} successful")
EOF
echo "== what the twin's writer of this project makes is the same to lerobot"
"$ours" scripts/make_lerobot_twin.py "$work/own_twin" --episodes 10
"$theirs" scripts/check_lerobot_data.py "$work/own_twin" 2> "$work/decoder.log"
echo "== policies of lerobot are evaluated"
for kind in smolvla act; do
    "$theirs" scripts/make_lerobot_policy.py $kind "$work/$kind" --state 5 --image-size 64
    "$theirs" -m vla_rl.commands.cli eval "$work/$kind" --config configs/tabletop.yaml policy=lerobot --episodes 4 "${small[@]}"
done
echo "== SmolVLA is cloned, trained, and its checkpoint evaluated"
theirs_too() { "$theirs" -m vla_rl.commands.cli "$@"; }
theirs_too sft configs/tabletop.yaml policy=lerobot "sft.start_from=$work/smolvla" sft.demo_episodes=20 sft.updates=4 \
    sft.batch=8 "sft.output=$work/cloned" "${small[@]}"
theirs_too train configs/tabletop.yaml policy=lerobot "policy.checkpoint=$work/cloned" policy.denoise_steps=2 \
    train.iterations=2 train.batch_episodes=4 algo.minibatches=1 algo.value_warmup=0 "log.dir=$work/runs" log.name=smolvla \
    "${small[@]}"
theirs_too eval "$work/runs/smolvla" --episodes 4
echo "== small π0 and π0.5 are trained by lerobot's networks, the action expert alone, and evaluated"
for kind in pi0 pi05; do
    "$theirs" scripts/make_lerobot_policy.py $kind "$work/$kind" --state 5 --image-size 64
    small_too() { VLA_RL_SMALL_GEMMA=262 PYTHONPATH=$PWD/tests/policies/lerobot/small_everywhere:$PYTHONPATH theirs_too "$@"; }
    small_too train configs/tabletop.yaml policy=lerobot "policy.checkpoint=$work/$kind" policy.denoise_steps=2 \
        policy.train_expert_only=true train.iterations=2 train.batch_episodes=4 algo.minibatches=1 algo.value_warmup=0 \
        "log.dir=$work/runs" log.name=$kind "${small[@]}"
    small_too eval "$work/runs/$kind" --episodes 4
    "$theirs" - "$work/$kind" "$work/runs/$kind/checkpoints/000002/policy" <<'EOF'
import sys
from safetensors.torch import load_file
before, after = (load_file(f"{folder}/model.safetensors") for folder in sys.argv[1:])
assert before.keys() == after.keys()
changed = [name for name in before if not before[name].equal(after[name])]
assert changed and not [name for name in changed if ".paligemma." in name], changed
print(f"{len(changed)} of {len(before)} tensors have been trained, none of the vision-language model")
EOF
done
echo "== π0: lerobot's network and the reader of its checkpoints"
"$theirs" scripts/make_pi0_reference.py "$work/pi0_reference"
cmp "$work/pi0_reference/expected.npz" tests/policies/pi0/published/expected.npz
echo "== tests that need lerobot"
"$theirs" -m pytest -q -p no:cacheprovider tests/policies/lerobot tests/envs/base/test_lerobot.py
echo "all of it works: $work"
