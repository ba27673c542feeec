"""A package of robot tasks by others, trained through the adapter for environments of gymnasium.

panda-gym is no package of the tests: its simulator, pybullet, has no wheel for Python 3.12 and takes 300 MB.
``scripts/train_gymnasium.sh`` installs it into the folder .third_party; set ``PYTHONPATH=.third_party`` for this test.
"""

import importlib.util
import math
from pathlib import Path

import pytest

from tests import ROOT
from vla_rl import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("panda_gym") is None, reason="no package panda_gym"),
]


def test_two_updates_on_a_task_of_panda_gym(tmp_path: Path) -> None:
    small = {"train.iterations": 2, "train.batch_episodes": 8, "train.eval_episodes": 4, "train.eval_every": 0}
    result = train(
        ROOT / "configs/panda_reach.yaml",
        overrides=small | {"log.dir": str(tmp_path), "log.name": "panda", "log.video": False, "log.tensorboard": False},
    )
    records = result.metrics
    assert [record["iteration"] for record in records] == [0, 1, 2]
    assert records[-1]["episodes/trained"] == 16
    assert all(math.isfinite(record["learner/grad_norm"]) for record in records[1:])
    assert records[-1]["learner/optimizer_steps"] > 0
    assert 0.0 <= records[-1]["eval/greedy_success"] <= 1.0
    assert (result.run / "checkpoints/000002/policy").is_dir()
