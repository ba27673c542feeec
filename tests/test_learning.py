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
    overrides = ["train.iterations=20", "train.eval_every=0", f"log.dir={tmp_path}", "log.name=run", "log.video=false"]
    assert train(load_config(_RECIPE, overrides, Machine.detect())) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = ([line[f"eval/{kind}_success"] for kind in ("greedy", "sampled")] for line in (lines[0], lines[-1]))
    assert min(after[0] - before[0], after[1] - before[1]) > 0, f"{before} before, {after} after 20 updates"
    assert sum(after) > sum(before) + 0.1, f"{before} before, {after} after 20 updates"
