"""One key changes where a run's parts are, for every simulator: the same training, by each placement mode.

"auto" chooses one of these; which one, and why, is tested in placement/test_plan.py and placement/test_search.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from vla_rl.commands.train import train
from vla_rl.config.loading import load_config
from vla_rl.core.machine import Machine
from vla_rl.placement.checks import machine_checks
from vla_rl.placement.layouts import choose_layout
from vla_rl.placement.resources import Resources

_CONFIGS = ROOT / "configs"
_SHORT = ["train.iterations=1", "train.batch_episodes=4", "train.eval_episodes=0", "env.max_episode_steps=8"]
_QUIET = ["log.video=false", "log.tensorboard=false", "algo.value_warmup=0", "placement.env_workers=1"]
_TURNS = {"collocated": True, "pipelined": False, "hybrid": True}


def _case(simulator: str, mode: str) -> Any:
    """ManiSkill's processes take long to start; commands/test_recipes.py runs it in the two other modes."""
    marks = [] if simulator == "libero_ppo" else [pytest.mark.maniskill]
    marks += [pytest.mark.exhaustive] if simulator == "maniskill_ppo" and mode != "pipelined" else []
    return pytest.param(simulator, mode, marks=marks, id=f"{simulator}-{mode}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulator", "mode"), [_case(simulator, mode) for simulator in ("libero_ppo", "maniskill_ppo") for mode in _TURNS]
)
def test_the_mode_is_one_key(simulator: str, mode: str, tmp_path: Path) -> None:
    """An update on all episodes played; devices are shared, and held in turns, where the mode says so."""
    where = [f"placement.mode={mode}", f"log.dir={tmp_path}", "log.name=run"]
    config = load_config(_CONFIGS / f"{simulator}.yaml", [*_SHORT, *_QUIET, *where], machine_checks(Machine.detect()))
    assert train(config) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1]
    assert all(line["rollout/episodes"] == 4 and line["learner/grad_norm"] > 0 for line in lines)
    shared = bool(choose_layout(config, Resources.of(Machine.detect(), config)).shared)
    assert shared == _TURNS[mode]
    assert ("busy/shared_devices" in lines[-1]) == shared
