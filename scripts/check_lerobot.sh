#!/usr/bin/env bash
# Checks with the package lerobot itself: its data sets are read, trained on, written, and read again by lerobot; its
# policies are evaluated. Minutes on two cores; needs no model hub.
#   bash scripts/check_lerobot.sh PYTHON [FOLDER]
# PYTHON: of an environment (3.12) with this project's libraries and lerobot[dataset,smolvla,pi]==0.6.1, such as
#   python3.12 -m venv VENV && VENV/bin/pip install "torch==2.11.*" ".[lerobot]" "lerobot[dataset,smolvla,pi]==0.6.1"
set -euo pipefail
python=${1:?name the Python of an environment with lerobot}
cd "$(dirname "$0")/.."
work=${2:-$(mktemp -d)}
mkdir -p "$work"
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
small=(train.eval_episodes=0 placement.env_workers=1 placement.envs_per_worker=4 env.max_episode_steps=24)
vla_rl() { "$python" -m vla_rl.commands.cli "$@"; }

echo "== versions"
"$python" -c "
from importlib.metadata import version
for name in ('lerobot', 'torch', 'transformers', 'numpy', 'huggingface_hub', 'pyarrow', 'av', 'ray', 'deepspeed'):
    print(name, version(name))"
echo "== a data set that lerobot writes is read, and trained on"
"$python" scripts/make_lerobot_twin.py "$work/twin" --episodes 20 --writer lerobot 2> "$work/encoder.log"
"$python" scripts/check_lerobot_data.py "$work/twin" 2> "$work/decoder.log"
vla_rl sft configs/tabletop.yaml "sft.demos=[$work/twin]" sft.updates=30 sft.batch=16 "sft.output=$work/policy" "${small[@]}"
echo "== episodes that an evaluation and a training run write are read by lerobot"
vla_rl eval "$work/policy" --config configs/tabletop.yaml --episodes 6 "log.dataset=$work/written" "${small[@]}"
"$python" - "$work/written" <<'EOF'
import sys
from lerobot.datasets.lerobot_dataset import LeRobotDataset
data = LeRobotDataset("vla_rl/written", root=sys.argv[1])
ends = [data[int(end) - 1] for end in data.meta.episodes["dataset_to_index"]]
assert data.num_episodes == 6 and all(bool(end["next.done"]) for end in ends)
print(f"lerobot reads {data.num_episodes} episodes, {sum(bool(end['next.success']) for end in ends)} successful")
EOF
vla_rl train configs/tabletop.yaml "policy.checkpoint=$work/policy" "log.dataset=$work/written" "log.dir=$work/runs" \
    train.iterations=1 train.batch_episodes=4 log.tensorboard=false "${small[@]}"
"$python" -c "
import sys
from lerobot.datasets.lerobot_dataset import LeRobotDataset
data = LeRobotDataset('vla_rl/written', root=sys.argv[1])
assert data.num_episodes >= 10, data.num_episodes
print(f'lerobot reads {data.num_episodes} episodes after a training run has added its own')" "$work/written"
echo "== policies of lerobot are evaluated"
for kind in smolvla act; do
    "$python" scripts/make_lerobot_policy.py $kind "$work/$kind" --state 5 --image-size 64
    vla_rl eval "$work/$kind" --config configs/tabletop.yaml policy=lerobot --episodes 4 "${small[@]}"
done
echo "== tests that need lerobot"
"$python" -m pytest -q -p no:cacheprovider tests/policies/lerobot tests/envs/base/test_lerobot.py
echo "all of it works: $work"
