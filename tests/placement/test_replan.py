"""vla_rl.placement.replan: when a run migrates to another plan, and that it loses nothing on the way."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs import env_spec
from tests.commands.test_train import _balanced, _metrics, _own_leftovers
from tests.placement.test_search import run_config
from vla_rl.cluster.processes.store import StoreProcess
from vla_rl.config.loading import load_config
from vla_rl.config.messages import ConfigError
from vla_rl.config.run_config import RunConfig
from vla_rl.placement import replan
from vla_rl.placement.plan import Layout, PlanError
from vla_rl.placement.planner import layout_record, plan_of_record
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import LinearCost, Memory, Profile, load_profile, save_profile
from vla_rl.placement.replan import Migration, Replanner, better_plan, worthwhile
from vla_rl.placement.resources import Resources
from vla_rl.placement.search import Candidate, candidate_of
from vla_rl.placement.workload import Workload
from vla_rl.replay.rules import StoreRules

RESOURCES = Resources(cores=8, devices=4, kind="virtual")
MEMORY = Memory(device=80, weights=1, trained=1)


def profile(infer: float, train: float, **changes: Any) -> Profile:
    """Costs of a row and of a chunk; the simulator costs next to nothing."""
    values: dict[str, Any] = {
        "name": "made up",
        "simulator_on": "cores",
        "simulate": LinearCost(each=0.001),
        "render": LinearCost(each=0.0005),
        "reset": 0.001,
        "infer": LinearCost(fixed=0.004, each=infer),
        "train": LinearCost(fixed=0.004, each=train),
        "weight_sync": 0.001,
        "memory": MEMORY,
    }
    return Profile(**values | changes)


def workload(config: RunConfig) -> Workload:
    return Workload.of(config, 32, 0.5)


def plan_of(config: RunConfig, inference: int) -> Any:
    devices = tuple(range(RESOURCES.devices))
    return make_plan(config, RESOURCES, Layout("pipelined", (), devices[:inference], devices[inference:]))


def candidate(inference: int, simulated: float) -> Candidate:
    config = run_config(False)
    found = candidate_of(plan_of(config, inference), profile(0.01, 0.01), workload(config))
    return replace(found, simulated=simulated)


def test_a_small_gain_is_not_worth_a_migration_and_a_large_one_is() -> None:
    now = candidate(1, 10.0)
    assert worthwhile(now, [candidate(2, 9.5), now]) is None
    assert worthwhile(now, [now]) is None
    migration = worthwhile(now, [candidate(3, 8.0), candidate(2, 7.0), now])
    assert migration is not None
    assert migration.plan.layout.describe() == "pipelined 2+2"
    assert migration.text() == (
        "migrating from pipelined 1+3 to pipelined 2+2: 7 s per super-batch expected instead of 10"
    )
    assert migration.record() == {"from": "pipelined 1+3", "from_s": 10.0, "to": "pipelined 2+2", "to_s": 7.0}


def test_a_run_migrates_to_where_its_costs_are() -> None:
    config = run_config(False)
    costs = profile(infer=0.001, train=0.05)
    migration = better_plan(config, RESOURCES, costs, workload(config), plan_of(config, 3))
    assert migration is not None
    assert len(migration.plan.learners) > 1
    assert better_plan(config, RESOURCES, costs, workload(config), migration.plan) is None, "and stays there"


def test_never_to_a_plan_that_does_not_fit() -> None:
    config = run_config(False, offload="never")
    tight = Memory(device=10, weights=6, trained=0)  # one role on each device
    costs = profile(infer=0.001, train=0.05, memory=tight)
    migration = better_plan(config, RESOURCES, costs, workload(config), plan_of(config, 3))
    assert migration is not None
    assert migration.plan.layout.describe() == "pipelined 1+3"
    roomy = better_plan(config, RESOURCES, profile(infer=0.02, train=0.05), workload(config), plan_of(config, 3))
    assert roomy is not None
    assert roomy.plan.layout.mode == "collocated", "by the costs alone it would share all devices"
    nowhere = profile(infer=0.001, train=0.05, memory=Memory(device=5, weights=6, trained=0))
    with pytest.raises(PlanError, match="would hold"):
        better_plan(config, RESOURCES, nowhere, workload(config), plan_of(config, 3))


def test_under_zero_the_number_of_ranks_stays() -> None:
    config = run_config(False)
    divided = config.model_copy(update={"learner": config.learner.model_copy(update={"zero_stage": 1})})
    assert better_plan(divided, RESOURCES, profile(0.001, 0.05), workload(config), plan_of(divided, 3)) is None
    shared = make_plan(divided, RESOURCES, Layout("hybrid", (), (0,), (0, 1, 2, 3)))
    migration = better_plan(divided, RESOURCES, profile(0.2, 0.001), workload(config), shared)
    assert migration is not None
    assert len(migration.plan.learners) == 4


def test_a_search_is_by_what_was_measured_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Profile] = []
    better: list[Migration | None] = [None, Migration(candidate(1, 2.0), candidate(2, 1.0))]

    def better_plan(config: RunConfig, resources: Resources, found: Profile, *_: Any) -> Migration | None:
        seen.append(found)
        return better[len(seen) - 1]

    monkeypatch.setattr(replan, "better_plan", better_plan)
    config = run_config(False, replan_every=2)
    spec, current = env_spec(config.env), plan_of(config, 1)
    replanner = Replanner(config, spec, "name", MEMORY)
    assert replanner.profile() is None
    assert replanner.propose(2, current) is None, "nothing was measured"
    replanner.observe(growth(seconds=1.0))
    assert replanner.propose(3, current) is None, "not due"
    assert seen == []
    assert replanner.propose(4, current) is None, "not worth it"
    assert replanner.propose(6, current) is None, "nothing new"
    replanner.observe(growth(seconds=3.0))
    assert replanner.propose(8, current) == better[1]
    assert [p.infer(1) for p in seen] == [1.0, 3.0]
    assert replanner.migrations == 1
    state = json.loads(json.dumps(replanner.state()))
    resumed = Replanner(config, spec, "name", MEMORY, state)
    assert resumed.migrations == 1
    assert resumed.state() == state
    whole = resumed.profile()
    assert whole is not None
    assert (whole.infer(1), whole) == (2.0, replanner.profile())
    assert resumed.propose(10, current) is None, "nothing was measured since"


def growth(seconds: float) -> dict[str, list[dict[str, float]]]:
    """One call of size 1 of each activity, as ``Throughput.growth``."""
    names = {"worker": ("simulate", "render"), "server": ("act",), "learner": ("micro_batch",)}
    line = {"calls": 1.0, "n": 1.0, "nn": 1.0, "nt": seconds, "t": seconds}
    return {
        group: [{f"{name}_{key}": x for name in activities for key, x in line.items()}]
        for group, activities in names.items()
    }


def test_a_checkpoint_keeps_the_layout() -> None:
    config = run_config(False, virtual="any.yaml", devices=4)
    plan = replace(make_plan(config, RESOURCES, Layout("hybrid", (), (0,), (0, 1, 2, 3))), offload=True)
    record = json.loads(json.dumps(layout_record(plan)))
    restored = plan_of_record(config, record)
    assert restored is not None
    assert replace(restored, machines=plan.machines) == plan, "on the machine that there is now"
    assert plan_of_record(run_config(False, virtual="any.yaml", devices=2), record) is None, "2 devices are too few"


def test_replanning_needs_the_choice_of_the_mode() -> None:
    with pytest.raises(ConfigError, match=r"placement\.replan_every=5 .*placement\.mode=hybrid fixes one; use 0, or"):
        load_config(None, ["placement.replan_every=5", "placement.mode=hybrid"])
    assert load_config(None, ["placement.replan_every=5"]).placement.replan_every == 5


def test_a_closed_store_starts_nothing_and_loses_nothing() -> None:
    store = StoreProcess(StoreRules(4, 1, 2, 12, 0, iterations=9))
    assert store.take(0, 4, 0.05) == []
    store.open()
    assert len(store.take(0, 4, 0.05)) == 4
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.take, 0, 4, 1.0)
        assert len(waiting.result()) == 4, "the gate lets two super-batches begin"
        waiting = pool.submit(store.take, 0, 4, 0.5)
        time.sleep(0.1)
        store.close()
        store.advance(1)  # would open the gate
        assert waiting.result() == []
    assert store.take(0, 4, 0.05) == []
    assert (store.counters()["running"], store.counters()["lost"]) == (8, 0)
    store.stop()


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_with_a_wrong_profile_migrates_and_loses_nothing(tmp_path: Path) -> None:
    """Training is expensive on these virtual devices; the configured profile says inference, and forbids sharing."""
    from vla_rl.commands.train import train

    truth = profile(infer=0.001, train=0.03)
    save_profile(truth, tmp_path / "truth.yaml")
    wrong = profile(infer=0.03, train=0.001, memory=Memory(device=10, weights=6, trained=0))
    save_profile(wrong, tmp_path / "wrong.yaml")

    def config(iterations: int) -> RunConfig:
        rounds = {"iterations": iterations, "batch_episodes": 12, "eval_episodes": 4, "eval_every": 5}
        return RunConfig.model_validate(
            {
                "env": {"name": "workload", "max_episode_steps": 32, "length_spread": 0.5, "step_ms": 0.25},
                "policy": {"name": "openvla_oft", "chunk_size": 4},
                "algo": {"name": "ppo", "minibatches": 1},
                "train": rounds | {"checkpoint_every": 100, "max_staleness": 2},
                "learner": {"micro_batch": 8},
                "placement": {
                    "virtual": str(tmp_path / "truth.yaml"),
                    "profile": str(tmp_path / "wrong.yaml"),
                    "replan_every": 3,
                    "offload": "never",
                    "devices": 3,
                    "env_workers": 2,
                    "envs_per_worker": 6,
                    "max_batch": 8,
                },
                "log": {"dir": str(tmp_path), "name": "run", "tensorboard": False, "video": False},
            }
        )

    assert train(config(8)) == 0
    run = tmp_path / "run"
    (migration,) = map(json.loads, (run / "migrations.jsonl").read_text().splitlines())
    assert (migration["iteration"], migration["from"]) == (3, "pipelined 2+1")
    assert migration["to_s"] < 0.9 * migration["from_s"]
    metrics = _metrics(run)
    assert [m["iteration"] for m in metrics] == list(range(9))
    assert [m["placement/migrations"] for m in metrics] == [0] * 4 + [1] * 5
    assert all(_balanced(m) for m in metrics)
    last = metrics[-1]
    assert (last["episodes/trained"], last["episodes/published_version"], last["episodes/lost"]) == (96, 8, 0)
    assert last["episodes/evaluated"] == 12
    assert last["rollout/staleness_max"] <= 2
    before, after = (metrics[i]["time/iteration_s"] for i in (3, 8))
    assert after < before
    assert [m["time/seconds"] for m in metrics] == sorted(m["time/seconds"] for m in metrics)
    found = load_profile(run / "profile.yaml")
    assert found.infer(6) == pytest.approx(truth.infer(6), rel=0.5)
    assert found.train(8) == pytest.approx(truth.train(8), rel=0.2)
    assert found.weight_sync < 0.01
    assert not _own_leftovers()

    assert train(config(9), resume=run) == 0
    newest = json.loads((run / "checkpoints/000009/state.json").read_text())
    assert newest["layout"] == json.loads((run / "checkpoints/000008/state.json").read_text())["layout"]
    assert newest["replanner"]["migrations"] == _metrics(run)[-1]["placement/migrations"] == 1
    assert _metrics(run)[-1]["episodes/trained"] == 108


@pytest.mark.slow
def test_a_real_learner_migrates_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cores, from one device for each role to sharing both; the decision is made up."""
    from vla_rl.commands.train import train

    config = RunConfig.model_validate(
        {
            "env": {"name": "workload", "image_size": 48, "max_episode_steps": 16},
            "policy": {"name": "openvla_oft", "size": "nano"},
            "algo": {"name": "ppo", "minibatches": 1},
            "train": {"iterations": 3, "batch_episodes": 6, "eval_episodes": 0, "max_staleness": 1},
            "learner": {"micro_batch": 4},
            "placement": {"devices": 2, "env_workers": 1, "envs_per_worker": 2, "replan_every": 1},
            "log": {"dir": str(tmp_path), "name": "run", "tensorboard": False},
        }
    )

    def better_plan(config: RunConfig, resources: Resources, found: Profile, _: Any, current: Any) -> Migration | None:
        if current.layout.mode == "collocated":
            return None
        plan = make_plan(config, resources, Layout("collocated", (), (0, 1), (0, 1)))
        candidates = (candidate_of(p, found, workload(config)) for p in (current, plan))
        return Migration(*(replace(c, simulated=1.0) for c in candidates))

    monkeypatch.setattr(replan, "better_plan", better_plan)
    assert train(config) == 0
    metrics = _metrics(tmp_path / "run")
    assert [m["placement/migrations"] for m in metrics] == [0, 1, 1]
    assert ["busy/shared_devices" in m for m in metrics] == [False, True, True]
    assert all(_balanced(m) for m in metrics)
    assert (metrics[-1]["episodes/trained"], metrics[-1]["episodes/lost"]) == (18, 0)
    assert metrics[1]["rollout/staleness_max"] <= 1, "what was played before is trained after"
    assert not _own_leftovers()
