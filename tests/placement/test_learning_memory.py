"""vla_rl.placement.learning_memory: its arithmetic against the critic on meta tensors, and against stored episodes."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.placement.test_memory import LIBERO, TWO_VIEWS, fitted, held, machine
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import GIB, Gpu, Machine
from vla_rl.core.records import EnvSpec
from vla_rl.learner.chunk_critic import EnsembleCritic
from vla_rl.learner.readout import Bins
from vla_rl.learner.value_memory import ValueEpisode
from vla_rl.placement.host_memory import host_use
from vla_rl.placement.learning_memory import _inputs, critic_bytes, critic_weights, kept_bytes
from vla_rl.placement.memory import expected_memory
from vla_rl.placement.plan import PlanError
from vla_rl.placement.planner import plan_run
from vla_rl.placement.profile import LinearCost, Memory, Profile
from vla_rl.placement.update_calls import update_calls
from vla_rl.placement.workload import Workload
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import policy_sizes
from vla_rl.replay.memory import StoredEpisode

LARGE: dict[str, dict[str, Any]] = {
    "openvla_oft": {"name": "openvla_oft", "size": "7b", "head": "l1", "lora": {}},
    "pi0": {"name": "pi0", "size": "base", "horizon": 50, "padded_dim": 32},  # the width alone: it regresses no means
}
FEATURES = {"openvla_oft": 4096, "pi0": 2048}
SPECS = [LIBERO, replace(TWO_VIEWS, state_dim=71)]


def run(policy: str = "openvla_oft", **algo: Any) -> RunConfig:
    keys = {"name": "td3_bc", "critic_reads": "features"} | algo
    learner = {"precision": "bf16", "micro_batch": 4, "activation_checkpointing": True}
    return RunConfig.model_validate({"policy": LARGE[policy], "algo": keys, "learner": learner})


def critic_of(config: RunConfig, spec: EnvSpec, given: int) -> EnsembleCritic:
    algo: Any = config.algo
    chunk = config.policy.chunk_size * spec.action_dim
    sizes = given, chunk, algo.critics, algo.critic_width
    with torch.device("meta"):
        readout = Bins(algo.q_min, algo.q_max, algo.q_bins) if algo.critic_loss == "hl_gauss" else None
        return EnsembleCritic(algo.critic_reads, spec, *sizes, readout=readout, values=algo.rates_states)


def saved_numbers(config: RunConfig, spec: EnvSpec, critic: EnsembleCritic, given: int, rows: int) -> int:
    """What autograd saves of one step of the critic, by storage, its weights left out."""
    saved, own = dict[int, torch.Tensor](), {p.untyped_storage()._cdata for p in critic.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor  # kept alive: no address is used twice
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        images = torch.zeros((rows, len(spec.views), spec.image_size, spec.image_size, 3), dtype=torch.uint8)
        task, elapsed = torch.zeros(rows, dtype=torch.long), torch.zeros(rows)
        seen = PolicyInput(images, torch.zeros(rows, spec.proprio_dim), task, elapsed)
        state = critic.state(seen, torch.zeros(rows, given))
        critic.rate(state, torch.zeros(rows, config.policy.chunk_size, spec.action_dim)).sum()
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) // 4


@pytest.mark.parametrize("policy", LARGE)
@pytest.mark.parametrize("reads", ["features", "images", "state"])
@pytest.mark.parametrize("spec", SPECS, ids=["one view", "two views"])
def test_the_critic_has_its_weights_and_activations(policy: str, reads: str, spec: EnvSpec) -> None:
    config = run(policy, critic_reads=reads, critics=3, critic_width=192)
    features = policy_sizes(config.policy, spec, 2).features
    assert features == FEATURES[policy] + spec.proprio_dim
    given = {"features": features, "images": 0, "state": spec.state_dim}[reads]
    critic = critic_of(config, spec, given)
    weights = sum(p.numel() for p in critic.parameters())
    algo: Any = config.algo
    chunk = config.policy.chunk_size * spec.action_dim
    assert critic_weights(algo, spec, *_inputs(algo, spec, features, chunk), chunk) == weights
    found = saved_numbers(config, spec, critic, given, 6) - saved_numbers(config, spec, critic, given, 2)
    each = (critic_bytes(config, spec, features) - 20 * weights) / 4 / algo.batch
    assert each == pytest.approx(found / 4, rel=0.02)


def test_bins_and_values_of_states_are_counted() -> None:
    config = run(name="best_of_n", critic_loss="hl_gauss", q_bins=33)
    algo: Any = config.algo
    features = policy_sizes(config.policy, LIBERO, 2).features
    weights = sum(p.numel() for p in critic_of(config, LIBERO, features).parameters())
    chunk = config.policy.chunk_size * LIBERO.action_dim
    assert critic_weights(algo, LIBERO, *_inputs(algo, LIBERO, features, chunk), chunk) == weights


def stored(count: int, layout: dict[str, tuple[int, ...]], kind: type) -> Any:
    """An episode of ``count`` chunks; observations come one more often."""
    once = {"actions", "rewards", "num_steps"}
    arrays = {}
    for name, shape in layout.items():
        dtype: Any = np.uint8 if name == "images" else np.int32 if name == "num_steps" else np.float32
        dtype = np.float64 if kind is ValueEpisode and name == "rewards" else dtype
        arrays[name] = np.zeros((count + (name not in once), *shape), dtype)
    return kind(**arrays, **({"task": 0, "success": True} if kind is StoredEpisode else {}))


@pytest.mark.parametrize("reads", ["features", "state"])
def test_the_replay_memory_is_what_the_run_plays_and_no_more_than_it_may_hold(reads: str) -> None:
    spec, config = SPECS[1], run(critic_reads=reads)
    k, chunks = config.policy.chunk_size, math.ceil(spec.max_episode_steps / config.policy.chunk_size)
    layout = {"images": (2, 256, 256, 3), "proprio": (8,), "elapsed": (), "state": (71 * (reads == "state"),)}
    episode = stored(chunks, layout | {"actions": (k, 7), "rewards": (k,), "num_steps": ()}, StoredEpisode)
    few = config.with_values({"train.iterations": 2, "train.batch_episodes": 8})
    assert kept_bytes(few, spec, 4104) == 16 * episode.nbytes
    assert kept_bytes(config.with_values({"train.iterations": 10_000}), spec, 4104) == 4.0 * GIB


def test_the_value_heads_memory_is_what_it_keeps() -> None:
    spec, k = SPECS[1], 8
    policy = {"name": "openvla_oft", "size": "7b", "chunk_size": k}
    config = RunConfig.model_validate({"policy": policy, "algo": {"name": "ppo", "value_memory": 300}})
    chunks = math.ceil(spec.max_episode_steps / k)
    episode = stored(chunks, {"features": (4104,), "elapsed": (), "rewards": ()}, ValueEpisode)
    assert kept_bytes(config, spec, 4104) == 300 * sum(getattr(episode, f.name).nbytes for f in fields(episode))
    memory = expected_memory(config, spec, machine(80))
    assert (memory.critic, memory.kept) == (0.0, kept_bytes(config, spec, 4104) / GIB)
    assert expected_memory(config.with_values({"algo.value_memory": 0}), spec, machine(80)).kept == 0.0


def test_off_policy_at_7b_passes_a_whole_batch_at_once_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever learner.micro_batch is; the critic is small beside the policy."""
    few, many = run(batch=8), run(batch=256)
    learner = held(few, machine(80))["learner"]
    assert learner["activations"] == pytest.approx(
        held(few.with_values({"algo.batch": 16}), machine(80))["learner"]["activations"] / 2
    )
    assert learner["critic"] == pytest.approx(0.085, abs=0.001), "the members read 4096 features"
    assert fitted(few, machine(80)).learners
    with pytest.raises(PlanError, match=r"activations .*lower algo\.micro_batch"):
        fitted(many.with_values({"learner.activation_checkpointing": False}), machine(80))
    in_parts = many.with_values({"algo.micro_batch": 8})
    assert held(in_parts, machine(80))["learner"]["activations"] == learner["activations"]
    assert fitted(in_parts, machine(80)).learners
    monkeypatch.setattr(Machine, "detect", lambda: Machine(32, 40 * GIB, (Gpu("any", 80 * GIB),)))
    assert plan_run(few, LIBERO).learners
    with pytest.raises(PlanError, match=r"^algo\.memory_gib: .*episodes 40\.0"):
        plan_run(few.with_values({"algo.memory_gib": 40.0, "train.iterations": 10_000}), LIBERO)


def test_main_memory_holds_the_episodes_and_their_copy_in_a_checkpoint() -> None:
    config, where = run(batch=8).with_values({"train.iterations": 10_000}), machine(80)
    host = host_use(fitted(config, where), expected_memory(config, LIBERO, where), config, LIBERO)
    assert host["learner"] == {"episodes": 4.0}
    assert host["checkpoint"]["episodes"] == 4.0


FREE, EACH = LinearCost(each=0.0), LinearCost(each=1.0)


def seconds_of_an_update(
    config: RunConfig, train: LinearCost = FREE, step: float = 0.0, critic: LinearCost = FREE
) -> float:
    """Of a learner, where a call costs so much and everything else nothing. Episodes are of 10 chunks."""
    workload = Workload.of(config, horizon=80, spread=0.0)
    none: dict[str, Any] = dict.fromkeys(("simulate", "render", "infer"), FREE)
    about: dict[str, Any] = {"name": "x", "simulator_on": "cores", "reset": 0.0, "weight_sync": 0.0}
    memory = Memory(device=1, weights=1, trained=1)
    profile = Profile(train=train, step=step, critic=critic, memory=memory, **none, **about)
    return update_calls(profile, workload, workload.chunks, 1).seconds


@pytest.mark.parametrize("reads", ["features", "state"])
def test_an_update_is_as_long_as_its_passes_and_steps(reads: str) -> None:
    config = run(batch=64, critic_reads=reads, updates_per_step=0.5, actor_every=2)
    chunks = config.train.batch_episodes * 10
    steps = 0.5 * 8 * chunks  # of the critic
    assert seconds_of_an_update(config, step=1.0) == pytest.approx(steps / 2)
    states = 2 if reads == "features" else 1
    passes = 64 * (steps / 2 + states * steps / 3) + chunks / 3
    assert seconds_of_an_update(config, train=EACH) == pytest.approx(passes)
    in_parts = config.with_values({"algo.micro_batch": 8})
    assert seconds_of_an_update(in_parts, train=EACH) == pytest.approx(passes + 64 * steps / 2 / 3)


def test_a_measured_step_of_the_critic_counts_in_the_place_of_its_passes() -> None:
    config = run(batch=64, updates_per_step=0.5, actor_every=2)
    chunks = config.train.batch_episodes * 10
    steps = 0.5 * 8 * chunks
    of_actor = 64 * steps / 2 + chunks / 3
    critic = LinearCost(fixed=3.0, each=0.5)
    assert seconds_of_an_update(config, train=EACH, critic=critic) == pytest.approx(of_actor + steps * (3 + 0.5 * 64))


def test_steering_passes_the_policy_once_for_each_new_observation() -> None:
    policy = LARGE["pi0"] | {"steer": {}}
    algo = {"name": "dsrl", "batch": 64, "updates_per_step": 0.5, "actor_every": 2}
    config = RunConfig.model_validate({"policy": policy, "algo": algo})
    chunks = config.train.batch_episodes * 80 / config.policy.chunk_size
    steps = 0.5 * 80 * config.train.batch_episodes
    assert seconds_of_an_update(config, train=EACH) == pytest.approx(chunks / 3)
    assert seconds_of_an_update(config, critic=EACH) == pytest.approx(64 * steps * 3 / 2), "also the actor's steps"
    images = config.with_values({"algo.critic_reads": "images"})
    assert seconds_of_an_update(images, train=EACH) > 64 * steps / 2


def test_a_simulated_learner_makes_whole_calls() -> None:
    config = run(batch=64, updates_per_step=0.5, actor_every=2)
    workload = Workload.of(config, horizon=80, spread=0.0)
    none: dict[str, Any] = dict.fromkeys(("simulate", "render", "infer"), FREE)
    about: dict[str, Any] = {"name": "x", "simulator_on": "cores", "reset": 0.0, "weight_sync": 0.0}
    profile = Profile(train=EACH, critic=EACH, memory=Memory(device=1, weights=1, trained=1), **none, **about)
    before, *minibatches = update_calls(profile, workload, workload.chunks, 1).parts()
    steps = 0.5 * 8 * workload.chunks
    assert sum(call.activity == "critic_step" for call in before) == steps
    assert len(minibatches) == steps / 2
    assert [call.activity for call in minibatches[0]] == ["micro_batch", "step"]
