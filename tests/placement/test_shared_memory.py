"""vla_rl.placement.shared_memory: what a run needs, against what its parts are seen to hold."""

from __future__ import annotations

import weakref

import pytest

from tests import ROOT
from tests.runtime_fakes import trajectory
from vla_rl.cluster.cluster import Cluster
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.errors import UserError
from vla_rl.core.machine import GIB
from vla_rl.core.records import EnvSpec
from vla_rl.placement import shared_memory
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources
from vla_rl.placement.shared_memory import SharedMemoryNeeds, object_store_bytes
from vla_rl.policies.openvla_oft.config import LoraConfig
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.store import ReplayStore

LIBERO = EnvSpec("libero", ("main",), 256, 0, end_effector(), 512, ("put the bowl on the plate",))


def needs(config: RunConfig, spec: EnvSpec = LIBERO, *, training: bool = True) -> SharedMemoryNeeds:
    return SharedMemoryNeeds.of(config, spec, make_plan(config, Resources(128, 8, "cuda"), training=training))


def test_the_published_recipes_fit_a_usual_machine() -> None:
    """1024 episodes of 64 chunks of 256 x 256 pixels are 13.1 GiB as trajectories, and again as a super-batch."""
    config = load_config(ROOT / "configs/recipes/rlinf_libero10_grpo.yaml")
    found = needs(config)
    assert 25 < found.trajectories / GIB < 30
    assert found.weights == pytest.approx(2 * 2 * 7.5e9, rel=0.02)
    assert needs(config.with_values({"policy.lora": LoraConfig()})).weights == pytest.approx(2 * 0.23e9, rel=0.02)
    assert needs(config, training=False).total < GIB, "an evaluation trains nothing"


def test_the_bound_on_staleness_in_effect_counts() -> None:
    """mode=sync keeps no older data, whatever ``train.max_staleness`` says."""
    parts = {"train": {"max_staleness": 3, "batch_episodes": 256}}
    sync, asynchronous = (RunConfig.model_validate(parts | {"mode": mode}) for mode in ("sync", "async"))
    stores = [
        object_store_bytes(config, LIBERO) - object_store_bytes(config, LIBERO, training=False)
        for config in (sync, asynchronous)
    ]
    assert stores[1] / stores[0] == pytest.approx(5 / 2, rel=0.01)


@pytest.mark.parametrize(("max_staleness", "reuse"), [(0, 1), (2, 1), (2, 2)])
def test_no_more_trajectories_are_held_than_counted(max_staleness: int, reuse: int) -> None:
    rules = StoreRules(
        batch_episodes=4,
        max_staleness=max_staleness,
        reuse=reuse,
        num_tasks=2,
        max_episode_steps=12,
        seed=0,
        iterations=99,
    )
    store, held, most = ReplayStore(rules), [], 0
    try:
        for update in range(8):
            for episode in store.take(0, 1000, 0.0):
                finished = trajectory(episode, version=update)
                held.append(weakref.ref(finished.images))
                store.add(0, finished)
                del finished
                most = max(most, sum(ref() is not None for ref in held))
            batch = store.next_batch(10.0)
            assert batch is not None
            most = max(most, sum(ref() is not None for ref in held))
            assert batch.num_episodes <= 4 * reuse
            del batch
            store.advance(update + 1)
    finally:
        store.stop()
    assert most == 4 * (max_staleness + 1)


def test_too_little_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "free_shared_memory", lambda: 64 << 20)
    config = RunConfig.model_validate({"env": {"name": "workload"}, "log": {"video": False}})
    plan = make_plan(config, Resources(4, 4, "cpu"))
    spec = EnvSpec("workload", ("main",), 16, 0, end_effector(), 8, ("work",))
    with pytest.raises(UserError, match=r"needs 0\.3 GiB \(.*weights.*/dev/shm has 0\.1 GiB.*--shm-size=1g"):
        Cluster(config, plan, spec, StoreRules.of(config, spec)).__enter__()


def test_a_joined_cluster_has_an_object_store_of_its_own() -> None:
    config = RunConfig.model_validate({"placement": {"ray_address": "auto"}})
    assert needs(config).trajectories == 0
