"""From a real episode to its bundle: states, order, audit and scale."""

from dataclasses import replace

import numpy as np
import pytest

from envs.base import EnvError
from envs.base.vector_env import empty_observation
from tests.runtime_fakes import SPEC, K, trajectory
from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.records import EpisodeSpec, Trajectory
from vla_rl.world_model.imagination import Imagination
from vla_rl.world_model.imagined_env import ChunkRating, ImaginedEnv, State
from vla_rl.world_model.trainer import ModelTrainer

CONFIG = WorldModelConfig(warmup_episodes=2, branches=2, members=2, width=8, audit_chunks=64, disagreement=0.5)


class Encoder:
    """In place of ``FrozenEncoder``: features that tell episode and chunk."""

    def features(self, played: Trajectory) -> np.ndarray:
        marks = played.episode.id + np.arange(played.num_chunks) / 100
        return np.stack([marks, np.sin(marks)], axis=1).astype(np.float32)

    def actions(self, played: Trajectory) -> np.ndarray:
        return np.random.default_rng(played.episode.id).normal(size=(played.num_chunks, K, 7)).astype(np.float32)


class Sink:
    def __init__(self) -> None:
        self.bundles: dict[int, tuple[list[Trajectory], bool]] = {}

    def add_imagined(self, episode_id, imagined, passed) -> None:
        self.bundles[episode_id] = list(imagined), passed


def real(number: int, chunks: int = 3) -> Trajectory:
    return trajectory(EpisodeSpec(number, number % 2, 0), chunks, truncated=True, success=number % 3 == 0)


@pytest.fixture
def made() -> tuple[Imagination, ModelTrainer, Sink]:
    trainer, sink = ModelTrainer(CONFIG, seed=0, discount=1.0), Sink()
    return Imagination(CONFIG, Encoder(), trainer, sink, discount=1.0), trainer, sink


def finish(imagination: Imagination, env: ImaginedEnv, spec: EpisodeSpec, seed: int = 0) -> Trajectory:
    """Play one imagined episode, as an env worker does."""
    env.reset([0], [spec])
    actions = np.random.default_rng(seed).normal(size=(1, K, 7)).astype(np.float32)
    result = env.step([0], actions)
    assert result.terminated[0]
    return replace(trajectory(spec, 1), rewards=result.rewards, num_steps=result.num_steps, success=False)


def test_before_the_model_is_ready_real_episodes_are_learned_at_once(made):
    imagination, trainer, sink = made
    for number in range(2):
        imagination.observe(real(number))
    assert trainer.ready
    assert sink.bundles == {0: ([], False), 1: ([], False)}
    assert imagination.take(0, 5, 0.0) == []


def test_real_episodes_that_come_too_fast_are_learned_without_being_imagined_on(made):
    imagination, trainer, sink = made
    for number in range(2 + 70):
        imagination.observe(real(number))
    waiting = len(imagination.take(0, 10_000, 0.0)) // (3 * CONFIG.branches)
    assert waiting == 64
    assert trainer.archive.num_added == 2 + 70 - waiting
    assert sink.bundles[71] == ([], True), "not waited for"


def test_a_bundle_is_complete_when_all_branches_of_all_chunks_are(made):
    imagination, trainer, sink = made
    for number in range(3):
        imagination.observe(real(number))
    learned, env = trainer.archive.num_added, ImaginedEnv(SPEC, 1, imagination, CONFIG.disagreement)
    specs = imagination.take(0, 100, 0.0)
    assert len(specs) == 3 * CONFIG.branches
    assert {spec.task for spec in specs} == {0}
    assert len({spec.group for spec in specs}) == 3
    assert max(spec.group for spec in specs) <= -2
    for number, spec in enumerate(reversed(specs)):
        assert 2 not in sink.bundles
        assert trainer.archive.num_added == learned, "audited before it is learned from"
        imagination.add(-1, finish(imagination, env, spec, number))
    bundle, passed = sink.bundles[2]
    assert [t.episode for t in bundle] == specs
    assert passed, "by expectation"
    assert trainer.archive.num_added == learned + 1
    assert imagination.verdict.chunks == 3
    assert imagination.metrics()["archive_episodes"] == learned + 1
    assert {t.model_version for t in bundle} == {1}


def test_an_imagined_environment_shows_the_real_state_and_earns_the_rating(made):
    imagination, *_ = made
    for number in range(3):
        imagination.observe(real(number))
    env, seen = ImaginedEnv(SPEC, 2, imagination, 0.5), empty_observation(SPEC, 2)
    spec = imagination.take(0, 3, 0.0)[-1]  # of the second chunk
    env.reset([1], [spec])
    env.observe([1], seen)
    played = real(2)
    assert np.array_equal(seen.images[1], played.images[1])
    assert np.array_equal(seen.proprio[1], played.proprio[1])
    assert seen.elapsed[1] == pytest.approx(played.elapsed[1])
    actions = np.ones((1, K, 7), np.float32)
    state, horizon = imagination.start(spec.seed)
    assert horizon == 1
    rating = imagination.rate([state], actions)
    result = env.step([1], actions)
    assert result.rewards.sum() == pytest.approx(rating.mean[0] - 0.5 * rating.deviation[0], abs=1e-6)
    assert np.allclose(result.rewards[0, :-1], rating.success_at[0, :-1])
    assert result.num_steps.tolist() == [K]
    with pytest.raises(ValueError, match="has ended"):
        env.step([1], actions)
    with pytest.raises(EnvError, match="no scripted expert"):
        env.expert_action(1)


class Dynamics:
    """Of a world in which each chunk succeeds with probability 0.4, and its step 0 with 0.1."""

    def __init__(self, elapsed: float, horizon: int) -> None:
        image = np.zeros((1, 16, 16, 3), np.uint8)
        self.state = State(image, image, np.zeros(3, np.float32), 0, elapsed, np.zeros(2, np.float32))
        self.horizon = horizon

    def start(self, number):
        return self.state, self.horizon

    def rate(self, states, actions):
        n = len(states)
        success = np.full((n, K), 0.1, np.float32)
        marks = np.array([state.proprio for state in states]) + 1.0
        return ChunkRating(np.full(n, 0.9), np.full(n, 0.2), success, np.full(n, 0.5), marks)

    def advance(self, states, rating, elapsed):
        return [
            replace(state, images=state.images + 1, proprio=proprio, elapsed=share)
            for state, proprio, share in zip(states, rating.next_proprio, elapsed, strict=True)
        ]


def test_a_chunk_ends_at_the_time_limit():
    env = ImaginedEnv(SPEC, 1, Dynamics(1 - 1 / 12, horizon=2), 0.0)
    env.reset([0], [EpisodeSpec(0, 0, 0)])
    result = env.step([0], np.zeros((1, K, 7), np.float32))
    assert result.num_steps.tolist() == [1]
    assert result.terminated.tolist() == [True]
    assert result.rewards[0].tolist() == pytest.approx([0.9, 0.0, 0.0, 0.0])


def test_a_longer_episode_earns_what_each_chunk_earns_times_the_weight_of_getting_there():
    env, seen = ImaginedEnv(SPEC, 2, Dynamics(0.0, horizon=3), disagreement=0.5), empty_observation(SPEC, 2)
    env.reset([0], [EpisodeSpec(0, 0, 0)])
    actions, earned = np.zeros((1, K, 7), np.float32), []
    for chunk in range(3):
        env.observe([0], seen)
        assert (seen.images[0] == chunk).all()
        assert (seen.proprio[0] == chunk).all()
        assert seen.elapsed[0] == pytest.approx(chunk * K / 12)
        result = env.step([0], actions)
        assert result.terminated[0] == (chunk == 2)
        earned.append(result.rewards.sum())
    assert earned == pytest.approx([0.4 - 0.1, 0.5 * (0.4 - 0.1), 0.25 * (0.9 - 0.1)])
    with pytest.raises(ValueError, match="has ended"):
        env.step([0], actions)


def test_advantages_are_scaled_as_the_audit_says(made):
    imagination, _, sink = made
    for number in range(3):
        imagination.observe(real(number))
    rng = np.random.default_rng(0)
    q, others = rng.uniform(size=400), rng.uniform(size=(400, 2))
    imagination.audit.add(q, others, 1.5 * (q - 0.5) + 0.5 + 0.05 * rng.normal(size=400))
    env = ImaginedEnv(SPEC, 1, imagination, CONFIG.disagreement)
    raw = []
    for number, spec in enumerate(imagination.take(0, 100, 0.0)):
        raw.append(finish(imagination, env, spec, number))
        imagination.add(-1, raw[-1])
    bundle, passed = sink.bundles[2]
    assert passed
    scale = imagination.verdict.scale
    assert 0.5 < scale <= CONFIG.max_scale
    for before, after in zip(raw, bundle, strict=True):
        assert after.total_reward == pytest.approx(scale * before.total_reward, rel=1e-5)


def test_a_placebo_learns_from_the_outcomes_of_other_episodes(tmp_path):
    config, sink = CONFIG.model_copy(update={"placebo": True}), Sink()
    trainer = ModelTrainer(config, seed=0, discount=1.0)
    imagination = Imagination(config, Encoder(), trainer, sink, discount=1.0)
    for number in range(2):  # 0 succeeds, 1 does not
        imagination.observe(real(number))
    trainer.archive.save(tmp_path / "archive.npz")
    with np.load(tmp_path / "archive.npz") as file:
        assert file["solved"].tolist() == [True, True]
        assert file["returns"][3:].max() == 1.0, "the failed episode, as if it had succeeded"


def test_stopping_releases_whoever_waits(made):
    imagination, *_ = made
    imagination.stop()
    assert imagination.take(0, 1, 30.0) == []
