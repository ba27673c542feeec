"""What a world model imagines reaches the critic: the right chunk, and how much better it is than the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.test_dsrl import STEERED
from tests.learner.test_off_policy import SPEC, acted, made
from tests.runtime_fakes import A, K, trajectory
from vla_rl.config.loading import ConfigError, load_config
from vla_rl.core.records import EpisodeSpec, SuperBatch, Trajectory, chunk_number, chunk_of
from vla_rl.learner.off_policy import OffPolicyLearner
from vla_rl.learner.practice import GAINS, IMAGINED, imagined_record, practised
from vla_rl.replay.super_batch import collate

BRANCHES = 3
MODEL = "world_model={branches: 3}"


def imagined(real: Trajectory, chunk: int, rng: np.random.Generator) -> list[Trajectory]:
    """Three branches in the state of a chunk; the reward of each lies in any of its steps."""
    branches = []
    for member in range(BRANCHES):
        spec = EpisodeSpec(member, real.episode.task, chunk_number(real.episode.id, chunk), group=-2, member=member)
        rewards = np.zeros((1, K), np.float32)
        rewards[0, member] = rng.uniform()
        branches.append(_of_continuous(replace(trajectory(spec, chunks=1), rewards=rewards, model_version=1), rng))
    return branches


def _of_continuous(t: Trajectory, rng: np.random.Generator) -> Trajectory:
    images = rng.integers(0, 256, (len(t.images), 1, SPEC.image_size, SPEC.image_size, 3)).astype(np.uint8)
    actions = rng.uniform(-1, 1, (t.num_chunks, K, A)).astype(np.float32)
    noise = rng.normal(size=(t.num_chunks, 1, A)).astype(np.float32)  # which steered policies record as well
    return replace(t, images=images, record={"actions": actions, "noise": noise})


def practice_batch(seed: int = 0, states: tuple[tuple[int, int], ...] = ((1, 0), (1, 1))) -> SuperBatch:
    """Three real episodes of two chunks; branches in the states of these (episode, chunk)."""
    rng = np.random.default_rng(seed)
    real = [_of_continuous(trajectory(EpisodeSpec(i + 10, 0, i), chunks=2), rng) for i in range(3)]
    return collate(real, 0, 12, imagined=[t for i, chunk in states for t in imagined(real[i], chunk, rng)])


def test_a_chunk_has_one_number_in_a_run() -> None:
    assert chunk_of(chunk_number(7, 3)) == (7, 3)
    assert chunk_number(np.array([7, 8]), np.array([3, 0])).tolist() == [chunk_number(7, 3), chunk_number(8, 0)]


def test_branches_are_kept_with_the_chunk_in_whose_state_they_begin() -> None:
    batch = practice_batch(states=((2, 1), (0, 0)))
    actions = batch.record["actions"]
    record = imagined_record(batch, actions, BRANCHES)
    assert (record[IMAGINED].shape, record[GAINS].shape) == ((6, BRANCHES, K, A), (6, BRANCHES))
    assert np.isfinite(record[GAINS]).all(axis=1).tolist() == [True, False, False, False, False, True]
    assert np.array_equal(record[IMAGINED][5], actions[6:9])
    assert np.array_equal(record[IMAGINED][0], actions[9:12])
    earned = batch.rewards[6:9].sum(axis=1)
    assert record[GAINS][5] == pytest.approx(earned - earned.mean(), abs=1e-6)
    nothing = imagined_record(practice_batch(states=()), actions[:6], BRANCHES)
    assert np.isnan(nothing[GAINS]).all()


@pytest.mark.parametrize(("algo", "changes"), [("td3_bc", ()), ("best_of_n", ()), ("dsrl", (STEERED,))])
def test_the_critic_learns_which_imagined_chunk_is_better(algo: str, changes: tuple[str, ...]) -> None:
    settings = "algo.critic_warmup=1000", "algo.critic_reads=features", "algo.critic_lr=3e-3"
    learner = made(MODEL, *changes, *settings, algo=algo)
    batch = practice_batch()
    losses = [learner.update(batch)["learner/imagined_loss"] for _ in range(15)]
    assert losses[-1] < 0.3 * losses[0]


def drawn_loss(learner: OffPolicyLearner) -> torch.Tensor | None:
    t = learner._drawn(None, np.random.default_rng(0))
    before = learner._seen(t.before, t.task)
    return practised(learner._critic, learner._critic.state(before, torch.zeros(len(t.task), 0)), t)


def test_where_nothing_is_imagined_the_critic_is_trained_as_without_a_model() -> None:
    with_model, without = made(MODEL), made()
    for batch in (practice_batch(states=()), acted(1, version=1)):
        one, other = with_model.update(batch), without.update(batch)
        assert one.pop("learner/memory_gib") > other.pop("learner/memory_gib")
        assert one == pytest.approx(other)
    assert drawn_loss(with_model) is None


def test_algorithms_that_have_no_use_for_imagined_chunks_are_refused() -> None:
    for algo in ("td3_bc", "ppo"):
        load_config(None, [f"algo={algo}", MODEL, "policy=gaussian"])
    with pytest.raises(
        ConfigError, match=r"world_model=.*algo\.name=iql has no use for imagined chunks; use ppo, grpo"
    ):
        load_config(None, ["algo=iql", MODEL, "policy=gaussian"])


def test_a_resume_keeps_what_was_imagined(tmp_path: Path) -> None:
    learner = made(MODEL)
    learner.update(practice_batch())
    learner.save(tmp_path)
    again = made(MODEL)
    again.load(tmp_path)
    loss = drawn_loss(learner)
    assert loss is not None
    assert drawn_loss(again) == loss
