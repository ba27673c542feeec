"""Ray's object store: as large as planned, and its memory taken before anything is played."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import ray

from vla_rl.cluster.cluster import Cluster
from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources
from vla_rl.placement.shared_memory import object_store_bytes
from vla_rl.replay.rules import StoreRules

SPEC = EnvSpec("workload", ("main",), 48, 0, end_effector(), 64, ("work",))
PREALLOCATE = "RAY_preallocate_plasma_memory"


class Started(Exception):
    """Ray would have been started."""


@pytest.mark.parametrize("training", [True, False])
def test_ray_starts_with_the_planned_store_and_takes_its_memory_at_once(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def init(**arguments: Any) -> None:
        asked.update(arguments, preallocates=os.environ.get(PREALLOCATE))
        raise Started

    monkeypatch.setattr(ray, "init", init)
    config = RunConfig.model_validate({"env": {"name": "workload"}, "train": {"batch_episodes": 64}})
    plan = make_plan(config, Resources(4, 4, "cpu"), training=training)
    with patch.dict(os.environ):
        os.environ.pop(PREALLOCATE, None)
        with pytest.raises(Started):
            Cluster(config, plan, SPEC, StoreRules.of(config, SPEC)).__enter__()
    planned = {known: object_store_bytes(config, SPEC, training=known) for known in (True, False)}
    assert planned[True] > planned[False]
    assert asked["object_store_memory"] == planned[training]
    assert asked["preallocates"] == "1"
