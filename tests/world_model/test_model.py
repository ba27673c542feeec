"""The ensemble, its archive and its trainer, on a problem whose answer is known: reach a place by moving there."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tests.runtime_fakes import trajectory
from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.records import EpisodeSpec
from vla_rl.world_model.archive import Archive, Episode
from vla_rl.world_model.model import ChunkInputs, ChunkOutcomes, WorldModel
from vla_rl.world_model.trainer import ModelTrainer

K, A, F, P = 3, 2, 5, 2
CONFIG = WorldModelConfig(warmup_episodes=8, width=32, batch=64, samples_per_chunk=20, members=3)


def reaching(rng: np.random.Generator, steps: int = 4) -> Episode:
    """A hand moves in the plane by a random chunk of actions; it succeeds when it comes near a goal, which the
    features show, and fails when it leaves the plane."""
    goal, hand = rng.uniform(-1, 1, 2), rng.uniform(-1, 1, 2)
    path, actions, event = [hand], [], 2 * K
    for _ in range(steps):
        chunk = (goal - hand) / K * rng.uniform(0, 0.7) + rng.normal(0, 0.25, (K, A))
        actions.append(chunk)
        for k in range(K):
            hand = hand + chunk[k]
            if np.abs(hand - goal).max() < 0.25:
                event = k
            elif np.abs(hand).max() > 1.6:
                event = K + k
            if event < 2 * K:
                break
        path.append(hand)
        if event < 2 * K:
            break
    n, solved = len(actions), event < K
    features = np.zeros((n, F), np.float32)
    features[:, :2], features[:, 2] = goal, 7.0
    return Episode(
        features=features,
        proprio=np.array(path, np.float32),
        elapsed=(np.arange(n) / steps).astype(np.float32),
        actions=np.array(actions, np.float32),
        event=np.where(np.arange(n) == n - 1, event, 2 * K),
        returns=np.where(np.arange(n) == n - 1, 0.0, float(solved)).astype(np.float32),
        solved=solved,
    )


@pytest.fixture(scope="module")
def trained() -> ModelTrainer:
    rng, trainer = np.random.default_rng(0), ModelTrainer(CONFIG, seed=0, discount=1.0)
    for _ in range(20):
        trainer.learn([reaching(rng) for _ in range(20)])
    return trainer


def test_a_frozen_model_learns_from_its_warm_up_alone():
    rng = np.random.default_rng(0)
    trainer = ModelTrainer(CONFIG.model_copy(update={"frozen": True, "warmup_episodes": 20}), seed=0, discount=1.0)
    versions = []
    for _ in range(4):
        trainer.learn([reaching(rng) for _ in range(10)])
        versions.append(trainer.version)
    assert versions == [0, 1, 1, 1]
    assert trainer.archive.num_added == 40


def test_outcomes_of_a_trajectory():
    episode = EpisodeSpec(3, 0, 0)
    features, actions = np.zeros((3, 4), np.float32), np.zeros((3, 4, 7), np.float32)

    def of(discount: float = 0.9, **changes) -> Episode:
        played = trajectory(episode, chunks=3, truncated=True)
        return Episode.of(replace(played, **changes), features, actions, discount)

    won = of(terminated=True, truncated=False, success=True, num_steps=np.array([4, 4, 2], np.int32))
    assert won.event.tolist() == [8, 8, 1]
    assert won.returns == pytest.approx([0.9, 1.0, 0.0])
    failed = of(terminated=True, truncated=False, success=False, num_steps=np.array([4, 4, 3], np.int32))
    assert failed.event.tolist() == [8, 8, 6]
    assert not failed.returns.any()
    late = of(success=False)
    assert late.event.tolist() == [8, 8, 8]
    assert not late.returns.any()
    with pytest.raises(ValueError, match="final observation"):
        Episode.of(trajectory(episode, chunks=3), features, actions, 0.9)


def test_losses_and_ratings_are_those_of_a_plain_loop_over_members():
    torch.manual_seed(0)
    model, n = WorldModel(F, P, K, A, members=3, width=8), 5
    inputs = ChunkInputs(torch.randn(n, F), torch.randn(n, P), torch.rand(n), torch.randn(n, K, A))
    event = torch.tensor([0, 2, 4, 6, 6])
    solved = torch.tensor([True, False, True, False, True])
    outcomes = ChunkOutcomes(event.expand(3, n), torch.rand(3, n), torch.randn(3, n, P), torch.randn(3, n, P), solved)
    predicted, rating = model(inputs), model.rate(inputs, discount=0.9)
    sums = dict.fromkeys(("event", "value", "proprio", "goal"), 0.0)
    q = np.zeros((3, n))
    for e in range(3):
        for i in range(n):
            p = predicted.event[e, i].softmax(-1)
            sums["event"] -= p[event[i]].log().item()
            value = predicted.value[e, i].sigmoid()
            if event[i] == 2 * K:
                r = outcomes.returns[e, i]
                sums["value"] -= (r * value.log() + (1 - r) * (1 - value).log()).item()
            sums["proprio"] += (predicted.next_proprio[e, i] - outcomes.next_proprio[e, i]).square().mean().item()
            if solved[i]:
                sums["goal"] += 2.0 * (predicted.goal[e, i] - outcomes.goal[e, i]).square().mean().item()
            q[e, i] = (p[:K].sum() + 0.9 * p[2 * K] * value).item()
    losses = model.loss(inputs, outcomes, hindsight=2.0)
    assert {name: loss.item() for name, loss in losses.items()} == pytest.approx(
        {name: total / n for name, total in sums.items()}, rel=1e-5
    )
    assert np.allclose(rating.mean, q.mean(0), atol=1e-6)
    assert np.allclose(rating.deviation, q.std(0, ddof=1), atol=1e-6)
    with pytest.raises(ValueError, match="chunks of 2"):
        model(replace(inputs, actions=inputs.actions[:, :2]))


def test_it_learns_which_chunk_reaches_the_goal(trained):
    """On states it has not seen: chunks of one state are ranked, and the hand's next place is predicted."""
    rng, right = np.random.default_rng(99), []
    for _ in range(200):
        episode = reaching(rng, steps=1)
        goal, hand = episode.features[0, :2], episode.proprio[0]
        towards = np.repeat(((goal - hand) / K)[None], K, axis=0)
        chunks = np.stack([towards, -towards]).astype(np.float32)
        both = np.repeat(episode.features, 2, axis=0), np.repeat(episode.proprio[:1], 2, axis=0), np.zeros(2)
        rating = trained.rate(*both, chunks)
        right.append(rating.mean[0] > rating.mean[1])
        assert np.isfinite(rating.deviation).all()
    assert np.mean(right) > 0.9
    assert trained.losses["proprio"] < 0.1, "a random guess has 1"


def test_inputs_of_one_unit_share_a_scale_and_constant_ones_are_zero(trained):
    scales = trained.archive.scales
    assert len(set(scales.features.std.tolist())) == 1
    assert len(set(scales.actions.std.tolist())) == 1
    assert len(set(scales.proprio.std.tolist())) == P
    assert scales.features(np.array([[0.0, 0.0, 7.0, 0.0, 0.0]], np.float32))[0, 2] == 0.0


def test_a_checkpoint_continues_bit_for_bit(trained, tmp_path):
    counters = trained.save(tmp_path)
    again = ModelTrainer(CONFIG, seed=5, discount=1.0)
    again.load(tmp_path, counters)
    assert (again.version, again.archive.num_added, len(again.archive)) == (trained.version, 400, 400)
    new = [reaching(np.random.default_rng(1)) for _ in range(4)]
    for trainer in (trained, again):
        trainer.learn(new)
    probe = (np.ones((2, F)), np.ones((2, P)), np.zeros(2), np.ones((2, K, A)))
    assert np.array_equal(trained.rate(*probe).mean, again.rate(*probe).mean)
    assert trained.losses == again.losses


def test_nothing_is_rated_before_the_first_training_and_old_episodes_leave(tmp_path):
    rng, trainer = np.random.default_rng(0), ModelTrainer(CONFIG, seed=0, discount=1.0)
    trainer.learn([reaching(rng) for _ in range(7)])
    assert not trainer.ready
    with pytest.raises(RuntimeError, match="not been trained"):
        trainer.rate(np.ones((1, F)), np.ones((1, P)), np.zeros(1), np.ones((1, K, A)))
    counters = trainer.save(tmp_path)
    again = ModelTrainer(CONFIG, seed=0, discount=1.0)
    again.load(tmp_path, counters)
    again.learn([reaching(rng)])
    assert again.ready


def test_rows_are_those_of_the_last_episodes_whenever_they_came():
    rng = np.random.default_rng(3)
    episodes = [reaching(rng) for _ in range(7)]
    one_by_one, more_than_it_holds, at_once = (Archive(capacity=3) for _ in range(3))
    one_by_one.add(episodes[:3])
    more_than_it_holds.add(episodes[:3])
    at_once.scales = more_than_it_holds.scales = one_by_one.freeze_scales()
    one_by_one.sample((1, 1), torch.Generator())
    more_than_it_holds.sample((1, 1), torch.Generator())
    more_than_it_holds.add(episodes[3:])
    for episode in episodes[3:]:
        one_by_one.add([episode])
    at_once.add(episodes)
    assert (len(one_by_one), one_by_one.num_added, one_by_one.num_chunks) == (3, 7, at_once.num_chunks)
    drawn = [
        archive.sample((2, 50), torch.Generator().manual_seed(0))
        for archive in (one_by_one, more_than_it_holds, at_once)
    ]
    for parts in zip(*drawn, strict=True):
        for other in parts[1:]:
            assert all(torch.equal(getattr(parts[0], f.name), getattr(other, f.name)) for f in fields(other))
