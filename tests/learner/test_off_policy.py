"""The off-policy learner: a critic that learns, an actor that follows it, and an exact resume."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from envs import make_env
from envs.base.demonstrations import collect
from tests.learner.learner_tools import random_batch
from tests.runtime_fakes import SPEC as SMALL
from tests.runtime_fakes import A, K
from vla_rl.config.loading import ConfigError, load_config
from vla_rl.core.errors import UserError
from vla_rl.core.machine import free_port
from vla_rl.core.records import STATE, STATE_AFTER, EnvSpec, SuperBatch
from vla_rl.core.tensor_files import load_tensors, save_tensors
from vla_rl.learner.build import make_learner
from vla_rl.learner.off_policy import OffPolicyLearner
from vla_rl.learner.process_group import join_ranks
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, save_policy
from vla_rl.replay.memory import DrawingRule, Seen, StoredEpisode, episodes_of
from vla_rl.replay.schedule import training_episode

SPEC = replace(SMALL, image_size=48)  # as in ``random_batch``
CHECKPOINTS = TemporaryDirectory()
QUICK = [
    *("policy=gaussian", f"policy.chunk_size={K}", "policy.channels=4", "policy.width=32", "env=tabletop"),
    *("algo.batch=16", "algo.critic_width=32", "algo.critic_warmup=4", "algo.updates_per_step=0.2"),
    *("algo.shift=1", "learner.lr=1e-3"),
]


def made(*changes: str, spec: EnvSpec = SPEC, algo: str = "td3_bc") -> OffPolicyLearner:
    config = load_config(None, [f"algo={algo}", *QUICK, *changes])
    if "policy.train_cameras=false" in changes:
        config = config.with_values({"policy.checkpoint": saved_policy()})
    if not torch.distributed.is_initialized():
        join_ranks(0, 1, ("127.0.0.1", free_port()), "cpu")
    policy = build_policy(config.policy, spec, config.seed)
    ranks: Any = {"rank": 0, "world_size": 1, "device": "cpu", "lease": nullcontext}
    learner = make_learner(config, policy, spec, **ranks)
    assert isinstance(learner, OffPolicyLearner)
    return learner


@cache
def saved_policy() -> str:
    """The folder of a checkpoint: weights that nobody has trained are never frozen."""
    config = load_config(None, ["algo=td3_bc", *QUICK])
    folder = f"{CHECKPOINTS.name}/policy"
    save_policy(config.policy, build_policy(config.policy, SPEC, 1), folder, {})
    return folder


def acted(seed: int = 0, version: int = 0) -> SuperBatch:
    """A super-batch of a policy with continuous actions."""
    batch = random_batch(seed, episodes=6, policy_version=version)
    actions = np.random.default_rng(seed).uniform(-1, 1, (batch.num_chunks, K, A)).astype(np.float32)
    return replace(batch, record={"actions": actions})


@pytest.mark.parametrize("algo", ["td3_bc", "rlpd"])
def test_a_share_of_each_batch_is_demonstrated(tmp_path: Path, algo: str) -> None:
    config = load_config(None, ["env=tabletop", "env.tasks=[reach]"])
    env = make_env(config.env, 1)
    collect(env, [training_episode(number, 0, 0) for number in range(2)], tmp_path / "demos.hdf5")
    env.close()
    demos = f"algo.demos=[{tmp_path}/demos.hdf5]"
    learner = made("env.tasks=[reach]", demos, "algo.demo_share=0.75", spec=env.spec, algo=algo)
    two = np.zeros(2, np.float32)
    empty = np.zeros((2, 0), np.float32)
    seen = np.zeros((2, 1, 64, 64, 3), np.uint8), np.zeros((2, env.spec.proprio_dim), np.float32), two, empty
    played = np.full((2, K, A), 2.0, np.float32), np.zeros((2, K), np.float32), np.full(2, K, np.int32)
    learner.memory.add([StoredEpisode(*seen, *played, task=0, success=False, record={"actions": played[0]})])
    t = learner._drawn(None, np.random.default_rng(0))
    demonstrated = np.abs(t.actions).max(axis=(1, 2)) <= 1
    assert len(t.task) == 16
    assert demonstrated.sum() == 12
    rng = np.random.default_rng(0)
    metrics = learner._critic_step(t, rng, 0.01) | learner._actor_step(t, rng)
    assert all(map(np.isfinite, metrics.values()))
    assert metrics["skipped_steps"] == 0


def test_demonstrations_hold_the_state_that_the_critic_reads(tmp_path: Path) -> None:
    """Those that this project's experts make; others are refused."""
    env = make_env(load_config(None, ["env=tabletop", "env.tasks=[reach]"]).env, 1)
    path, wanted = tmp_path / "demos.hdf5", ("env.tasks=[reach]", f"algo.demos=[{tmp_path}/demos.hdf5]")
    collect(env, [training_episode(0, 0, 0)], path)
    env.reset([0], [training_episode(0, 0, 0)])
    first = env.state([0])[0]
    env.close()
    learner = made(*wanted, "algo.critic_reads=state", spec=env.spec)
    t = learner._demos.sample(100, DrawingRule(), np.random.default_rng(0))
    assert t.before.state.shape == (100, env.spec.state_dim)
    assert (t.before.state == first).all(axis=1).any(), "before its action"
    assert np.unique(t.before.state, axis=0).shape[0] > 5
    assert made(*wanted, spec=env.spec)._demos.states().shape[1] == 0
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/scene_state"]
    with pytest.raises(UserError, match=r"critic_reads=state, and not all of algo\.demos hold"):
        made(*wanted, "algo.critic_reads=state", spec=env.spec)


def weights(learner: OffPolicyLearner) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in learner.policy.named_parameters()}


@pytest.mark.parametrize("changes", [[], ["algo.cql_coef=0.5", "algo.critic_reads=features", "algo.critic_subset=1"]])
def test_the_critic_warms_up_before_the_actor_moves(changes: list[str]) -> None:
    learner = made("algo.critic_warmup=12", *changes)
    before, batch = weights(learner), acted()
    steps = 0.2 * batch.num_steps.sum()
    metrics = learner.update(batch)
    assert metrics["learner/critic_steps"] == int(steps)
    assert "learner/explained_variance" not in metrics
    assert steps < 12
    assert all(np.array_equal(before[name], x) for name, x in weights(learner).items())
    metrics = learner.update(acted(1, version=1))
    assert metrics["learner/optimizer_steps"] > 0
    assert np.isfinite(metrics["learner/explained_variance"])
    moved = {name for name, x in weights(learner).items() if not np.array_equal(before[name], x)}
    assert any(name.startswith("action_head") for name in moved)
    assert not any(name.startswith("value_head") for name in moved)


@pytest.mark.parametrize("algo", ["td3_bc", "sac"])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(algo: str) -> None:
    changes = ["policy.channels=16", "algo.critic_warmup=0", "algo.critic_reads=features"]  # 16 = 7 + 7 + 2
    whole, parts = made(*changes, algo=algo), made(*changes, "algo.micro_batch=7", algo=algo)
    before = weights(whole)
    largest = []
    parts.policy.register_forward_hook(lambda _, __, output: largest.append(len(output.logprobs)))
    one, other = (learner.update(acted()) for learner in (whole, parts))
    assert max(largest) == 7
    assert other["learner/optimizer_steps"] == one["learner/optimizer_steps"] > 0
    assert other.keys() == one.keys()
    for name in one:
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    moved = 0.0
    for name, x in weights(whole).items():
        moved = max(moved, float(np.abs(x - before[name]).max()))
        assert np.allclose(x, weights(parts)[name], atol=2e-5), name
    assert moved > 1e-3, "a step of Adam is as long as the learning rate"


@pytest.mark.parametrize("changes", [[], ["algo.micro_batch=5"]])
@pytest.mark.parametrize("reads", ["features", "images"])
def test_the_policys_passes_are_those_that_the_planner_counts(reads: str, changes: list[str]) -> None:
    learner = made("algo.critic_warmup=0", "algo.updates_per_step=1", f"algo.critic_reads={reads}", *changes)
    learner.update(acted())
    rows = {True: 0, False: 0}  # by whether they have gradients

    def count(_: Any, __: Any, output: Any) -> None:
        rows[output.logprobs.requires_grad] += len(output.logprobs)

    learner.policy.register_forward_hook(count)
    batch = acted(1, version=1)
    learner.update(batch)
    work, chunks = learner.algorithm.config.work(K), batch.num_steps.sum() / K
    assert rows[True] == pytest.approx(work.epochs * chunks, rel=0.1)
    assert rows[False] == pytest.approx((work.extra_passes + work.critic_rows * work.critic_passes) * chunks, rel=0.1)


@pytest.mark.parametrize("pays", [True, False])
def test_the_actor_moves_towards_what_the_critic_has_seen_to_earn(pays: bool) -> None:
    """In one state, half of the chunks are near 0.4 and half near -0.4; one half earns. Cloning alone ends at 0."""
    changes = "algo.updates_per_step=3", "algo.cloning=1", "algo.critic_lr=3e-3", "learner.lr=3e-3"
    learner = made("algo.critic_reads=features", "algo.critic_warmup=40", *changes)
    batch = acted()
    sign = np.where(np.arange(batch.num_chunks) % 2, 1.0, -1.0).astype(np.float32)
    batch.images[:] = 127
    batch.proprio[:], batch.elapsed[:], batch.task[:] = 0, 0, 0
    batch.record["actions"][:] = 0.4 * sign[:, None, None] + 0.1 * batch.record["actions"]
    batch.rewards[:] = 0.0
    batch.rewards[:, 0] = pays * (sign > 0)
    ends = np.ones(batch.num_chunks, bool)
    batch = replace(  # one chunk an episode
        batch,
        offsets=np.arange(batch.num_chunks + 1, dtype=np.int32),
        new_episodes=batch.num_chunks,
        final_obs_row=np.full(batch.num_chunks, -1, np.int32),
        terminated=ends,
        truncated=~ends,
        success=ends,
        model_version=np.full(batch.num_chunks, -1, np.int32),
    )
    metrics = learner.update(batch)
    if pays:
        metrics = learner.update(batch)
        assert metrics["learner/explained_variance"] > 0.5
    empty = np.zeros((1, 0), np.float32)
    seen = learner._seen(Seen(batch.images[:1], batch.proprio[:1], batch.elapsed[:1], empty), batch.task[:1])
    means = learner._choices(seen, {"actions": np.zeros((1, K, A), np.float32)}).means
    assert means is not None
    if pays:
        assert means.mean() > 0.15
    else:
        assert abs(means.mean()) < 0.1


def test_what_a_critic_expects_beyond_what_follows_is_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = made("algo.critic_reads=features", "algo.gamma=0.9")
    assert "learner/critic_bias" not in learner.update(acted()), "it has not rated anything yet"
    rate = learner._critic.rate
    monkeypatch.setattr(learner._critic, "rate", lambda state, x: 0.0 * rate(state, x) + 0.7)
    batch = acted(1, version=1)
    batch.rewards[:] = 0.0
    found = learner._surprise(episodes_of(batch, batch.record["actions"], batch.truncated, batch.record))
    assert found == {"critic_bias": pytest.approx(0.7)}, "and where all earn the same, nothing can be explained"
    last = batch.offsets[1] - 1
    batch.rewards[last, batch.num_steps[last] - 1] = 1.0
    before = [batch.num_steps[row:last].sum() + batch.num_steps[last] - 1 for row in range(last + 1)]
    expected = 0.7 - sum(0.9**steps for steps in before) / batch.num_chunks
    found = learner._surprise(episodes_of(batch, batch.record["actions"], batch.truncated, batch.record))
    assert found["critic_bias"] == pytest.approx(expected, abs=1e-5)


FROZEN = "policy.train_cameras=false", "algo.critic_reads=state"


def with_states(batch: SuperBatch) -> SuperBatch:
    """Numbers of very different sizes, one of which says what the chunk will earn."""
    rng = np.random.default_rng(len(batch.rewards))
    before, after = (rng.normal([5.0, 0.0, 1e4], [1.0, 1e-5, 300.0], (batch.num_chunks, 3)) for _ in range(2))
    return replace(
        batch, record=batch.record | {STATE: before.astype(np.float32), STATE_AFTER: after.astype(np.float32)}
    )


def test_frozen_cameras_read_each_image_once() -> None:
    """The memory keeps what they make of it, and the policy answers as if it had seen the image."""
    learner, batch = made(*FROZEN), with_states(acted())
    before = weights(learner)
    learner.update(batch)
    (kept, *_) = learner.memory.episodes
    assert kept.images.shape[1:] == (32,)
    assert kept.images.dtype == np.float32
    images = batch.images[batch.obs_row[: len(kept)]]
    rest = kept.proprio[: len(kept)], kept.elapsed[: len(kept)], kept.state[: len(kept)]
    tasks, record = np.full(len(kept), kept.task, np.int32), {"actions": np.zeros((len(kept), K, A), np.float32)}
    with torch.no_grad():
        ours, theirs = (
            learner._choices(learner._seen(Seen(pixels, *rest), tasks), record).means
            for pixels in (kept.images[: len(kept)], images)
        )
    assert ours is not None
    assert torch.allclose(ours, theirs, atol=1e-5)
    learner.update(with_states(acted(1, version=1)))
    moved = {name for name, x in weights(learner).items() if not np.array_equal(before[name], x)}
    assert any(name.startswith("action_head") for name in moved)
    assert not any(name.startswith("cameras") for name in moved)


def test_random_weights_are_never_frozen() -> None:
    """``vla-rl sft`` with the keys of the run that is to come trains them, too."""
    config = load_config(None, ["algo=td3_bc", *QUICK, *FROZEN])
    policy = build_policy(config.policy, SPEC, 0)
    assert any(name.startswith("cameras") for name in policy.trained_parameters())
    assert policy.embedded(PolicyInput(*map(torch.zeros, [(1, 1, 48, 48, 3), (1, 3), (1,), (1,)]))) is None


def test_the_critic_reads_the_simulators_state() -> None:
    """Where nothing else tells what a chunk earns; numbers that hardly change do not explode."""
    changes = "algo.updates_per_step=2", "algo.critic_lr=3e-3", "algo.critic_warmup=10000", "algo.gamma=0"
    batch = with_states(acted())
    batch.rewards[:] = 0.0
    batch.rewards[:, 0] = batch.record[STATE][:, 2] > 1e4
    found = {}
    for reads in ("state", "features"):
        learner = made("policy.train_cameras=false", f"algo.critic_reads={reads}", *changes)
        constant = replace(batch, images=np.full_like(batch.images, 9), proprio=np.zeros_like(batch.proprio))
        constant.record["actions"][:] = 0.0
        for _ in range(2):
            found[reads] = learner.update(constant)["learner/critic_loss"]
    assert found["state"] < 0.2 * found["features"]


def test_the_target_equals_the_critic_while_it_warms_up() -> None:
    """And ratings begin at 0, for a chunk of any size in any state."""
    learner = made("algo.critic_reads=features", "algo.critic_warmup=1000", "algo.target_rate=0.01")
    critic = learner._made(32, K * A).online
    state = critic.state(learner._seen(*some_states(4)), torch.randn(4, 32))
    assert not critic.rate(state, torch.randn(4, K, A)).any()
    learner.update(acted())
    pairs = list(zip(critic.parameters(), learner._made(0, 0).target.parameters(), strict=True))
    assert critic.rate(state, torch.randn(4, K, A)).any()
    assert all(torch.equal(online, target) for online, target in pairs)


def test_the_actors_rate_warms_up_from_its_own_first_step_on(tmp_path: Path) -> None:
    """Not while the critic is trained alone; also in a run that is resumed."""
    changes = "algo.critic_warmup=30", "learner.warmup_iterations=2", "learner.lr_schedule=linear", "train.iterations=7"
    learner, found = made(*changes), []
    for version in range(6):
        metrics = learner.update(acted(version, version))
        found.append((metrics["learner/lr"], metrics.get("learner/optimizer_steps", 0.0)))
        if version == 3:
            learner.save(tmp_path)
            learner = made(*changes)
            learner.load(tmp_path)
    alone = [lr for lr, steps in found if not steps]
    assert 2 <= len(alone) <= 3, "the critic's updates alone"
    assert not any(alone)
    rates = [lr for lr, _ in found[len(alone) :]]
    left = 7 - len(alone) - 2  # updates from the third one of the actor on, over which the rate falls to 0
    expected = [1 / 3, 2 / 3, 1.0, 1.0 - 1 / left]
    assert rates == pytest.approx([1e-3 * share for share in expected[: len(rates)]])
    state = load_tensors(tmp_path / "off_policy.safetensors", torch.device("cpu"))
    save_tensors(state | {"count.all": state["count.all"][:4]}, tmp_path / "off_policy.safetensors")
    learner.load(tmp_path)
    assert learner._first_version == 0, "as an earlier commit counted, which saved no such number"


def test_the_critic_rates_what_a_simulator_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = made("algo.critic_reads=features", "algo.critic_warmup=1000")
    learner.policy.set_statistics(np.array([[-0.5] * A, [0.5] * A], np.float32), np.zeros((2, SPEC.proprio_dim)))
    learner.update(acted())
    critic = learner._critic
    state, chunk = critic.state(learner._seen(*some_states(4)), torch.randn(4, 32)), torch.full((4, K, A), 9.0)
    ends = [torch.tensor(x, dtype=torch.float32) for x in (SPEC.actions.low, SPEC.actions.high)]
    highest = (2 * ends[1]).expand(4, K, A)  # 1 stands for 0.5
    assert torch.equal(critic.rate(state, chunk), critic.rate(state, highest))
    assert not torch.equal(critic.rate(state, chunk), critic.rate(state, 0.9 * highest))
    monkeypatch.setattr(learner.policy, "action_limits", lambda ends: -ends * np.eye(A, dtype=np.float32)[0])
    low, high = learner._limits()
    assert (low[:, 0] < high[:, 0]).all(), "in any order"
    assert (low[:, 1:] == -np.inf).all(), "what never changes has none"
    assert (high[:, 1:] == np.inf).all()


@pytest.mark.parametrize("algo", ["td3_bc", "sac"])
def test_an_actor_stays_where_a_simulator_can_follow(algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more seems better and better, and nothing is cloned."""
    found = {}
    for limited in (True, False):
        learner = made("algo.critic_reads=features", "algo.cloning=0", "learner.lr=3e-2", algo=algo)
        if not limited:
            monkeypatch.setattr(learner.policy, "action_limits", lambda ends: None)
        learner.update(acted())
        monkeypatch.setattr(learner._critic, "rate", lambda state, chunk: chunk.flatten(1).sum(dim=1, keepdim=True))
        for step in range(60):
            t = learner._drawn(None, np.random.default_rng(step))
            learner._actor_step(t, np.random.default_rng(step))
        seen = learner._seen(t.before, t.task)
        found[limited] = learner._choices(seen, t.record).means.mean().item()
    assert 0.5 < found[True] < 1.5
    assert found[False] > 3


@pytest.mark.parametrize("changes", [(), ("algo.cql_coef=0.5", "algo.critic_reads=features")])
def test_a_soft_actor_trains_its_deviation(changes: tuple[str, ...]) -> None:
    """From a deviation of 0.3, entropy 0.215: it is raised, and alpha rises or falls towards the target."""
    settings = "algo.updates_per_step=0.5", "learner.lr=3e-2", "algo.alpha=2", "algo.alpha_lr=0.1", *changes
    found = {}
    for target in (1, -1):
        learner = made(f"algo.target_entropy={target}", *settings, algo="sac")
        learner.update(acted())
        found[target] = learner.update(acted(1, version=1))
    assert found[1]["learner/entropy"] > 0.23
    assert found[1]["learner/alpha"] > 2 > found[-1]["learner/alpha"]


def test_a_weight_without_a_target_stays() -> None:
    assert made("algo.alpha=2", "algo.alpha_lr=0.1", algo="sac").update(acted())["learner/alpha"] == 2


def some_states(n: int) -> tuple[Seen, np.ndarray]:
    rng = np.random.default_rng(0)
    proprio = rng.normal(size=(n, SPEC.proprio_dim)).astype(np.float32)
    images = np.zeros((n, 1, 48, 48, 3), np.uint8)
    return Seen(images, proprio, np.zeros(n, np.float32), np.zeros((n, 0), np.float32)), np.zeros(n, np.int32)


def test_a_simulator_without_a_state_is_refused() -> None:
    config = load_config(None, ["algo=td3_bc", *QUICK, *FROZEN])
    config.algo.check_simulator(replace(SPEC, state_dim=3))
    with pytest.raises(UserError, match=r"algo\.critic_reads=state.*does not give its state"):
        config.algo.check_simulator(SPEC)
    libero = ["env=libero", "algo=td3_bc", "policy=gaussian", "algo.critic_reads=state"]
    assert load_config(None, libero).env.name == "libero"
    with pytest.raises(ConfigError, match=r"env\.implementation=reference.* gives no state .*; use fast, or algo"):
        load_config(None, [*libero, "env.implementation=reference"])


def test_ratings_of_bins_begin_near_0_and_learn_what_chunks_earn() -> None:
    changes = "algo.critic_loss=hl_gauss", "algo.q_min=-1", "algo.q_max=2", "algo.critic_reads=features"
    learner = made(
        *changes, "algo.gamma=0", "algo.critic_lr=1e-2", "algo.critic_warmup=1000", "algo.updates_per_step=1"
    )
    critic = learner._made(32, K * A).online
    state = critic.state(learner._seen(*some_states(4)), torch.randn(4, 32))
    assert critic.rate(state, torch.randn(4, K, A)).abs().max() < 0.01
    batch = acted()
    batch.rewards[:] = 0.0
    batch.rewards[:, 0] = batch.record["actions"][:, 0, 0] > 0
    losses = [learner.update(batch)["learner/critic_loss"] for _ in range(2)]
    assert losses[1] < 0.6 * losses[0]
    assert learner.update(batch)["learner/explained_variance"] > 0.3


BINS = "algo.critic_loss=hl_gauss", "algo.q_bins=21"
TUNED = "algo.return_chunks=2", "algo.target_entropy=-1", "algo.alpha_lr=0.1", "algo.entropy_in_aim=true"


@pytest.mark.parametrize(("algo", "changes"), [("td3_bc", ()), ("td3_bc", FROZEN), ("sac", TUNED), ("sac", BINS)])
def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, algo: str, changes: tuple[str, ...]
) -> None:
    learner, again = made(*changes, algo=algo), made(*changes, algo=algo)
    learner.update(with_states(acted()))
    learner.save(tmp_path)
    again.load(tmp_path)
    ends = [x.update(with_states(acted(1, version=1))) for x in (learner, again)]
    assert ends[0] == ends[1]
    assert ends[0]["learner/optimizer_steps"] > 0
    assert all(np.array_equal(x, weights(again)[name]) for name, x in weights(learner).items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("policy=openvla_oft", "policy.name=openvla_oft.*have no gradient|no gradient"),
        ('algo={"name": "sac", "alpha": 0, "target_entropy": -1}', "alpha=0 cannot be tuned"),
        ("learner.zero_stage=1", "trains on one rank"),
        ("train.reuse=2", "keeps episodes already"),
        ("env.image_size=50", "multiple of 16"),
    ],
)
def test_what_cannot_follow_a_critic_is_refused(change: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, ["policy=gaussian", "algo=td3_bc", "train.max_staleness=3", change])


def test_an_actor_that_draws_needs_a_normal_distribution() -> None:
    with pytest.raises(ConfigError, match=r"policy\.name=openvla_oft.*no normal distribution"):
        load_config(None, ["policy=openvla_oft", "policy.head=l1", "algo=sac", "train.max_staleness=3"])
