"""A policy learns: the whole asynchronous runtime, from the committed warm start, by the committed recipe."""

import json
from pathlib import Path

import pytest

from vla_rl.config_loading import load_config
from vla_rl.machine import Machine
from vla_rl.runner import train

_RECIPE = Path(__file__).parent.parent / "configs" / "tabletop.yaml"


@pytest.mark.slow
def test_ppo_learns_the_tabletop_from_its_warm_start(tmp_path):
    """Success on the held-out benchmark placements rises, for the most likely actions and for sampled ones."""
    overrides = ["train.iterations=30", "train.eval_every=0", f"log.dir={tmp_path}", "log.name=run", "log.video=false"]
    assert train(load_config(_RECIPE, overrides, Machine.detect())) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for key in ("eval/greedy_success", "eval/sampled_success"):
        first, last = lines[0][key], lines[-1][key]
        assert last > first + 0.1, f"{key}: {first:.2f} before, {last:.2f} after 30 updates"
