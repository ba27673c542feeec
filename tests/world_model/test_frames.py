"""Frames and horizons, in a world whose frames are known: a hand moves over a table and carries the block under it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime_fakes import trajectory
from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.records import EpisodeSpec, Trajectory
from vla_rl.world_model.archive import Episode
from vla_rl.world_model.composed_frames import ComposedFrames
from vla_rl.world_model.diffusion_frames import DiffusionFrames
from vla_rl.world_model.frame_archive import FrameArchive, FrameEpisode
from vla_rl.world_model.frame_trainer import FrameTrainer
from vla_rl.world_model.frames import FrameInputs, changed_pixels
from vla_rl.world_model.futures import Futures, read_futures
from vla_rl.world_model.horizon import LEAST_PREDICTIONS, HorizonGate, Prediction
from vla_rl.world_model.imagined_env import ChunkRating

SIZE, CHUNKS = 16, 4
COMPOSED = WorldModelConfig(frame_width=8, frame_episodes=40, frame_samples_per_chunk=32, frame_lr=6e-3, horizon=3)
SMALL: dict[str, int] = {"diffusion_width": 64, "diffusion_depth": 2, "diffusion_patch": 4}
DIFFUSION = COMPOSED.model_copy(
    update={"frame_model": "diffusion", "frame_lr": 3e-3, "frame_samples_per_chunk": 64, **SMALL}
)


def picture(hand: np.ndarray, block: int) -> np.ndarray:
    """uint8 [1, H, W, 3]: a table in the block's color of this episode, and the hand at a place in 0..1."""
    frame = np.full((1, SIZE, SIZE, 3), 90, np.uint8)
    frame[0, 12:15, block : block + 3] = 220, 40, 40
    x, y = (hand * (SIZE - 4)).round().astype(int)
    frame[0, y : y + 4, x : x + 4] = 240, 240, 60
    return frame


def moving(number: int) -> Trajectory:
    """An episode in which the hand moves at random; proprioception is its place."""
    rng = np.random.default_rng(number)
    block, hands = int(rng.integers(12)), rng.uniform(0, 1, (CHUNKS + 1, 2)).astype(np.float32)
    played = trajectory(EpisodeSpec(number, number % 2, 0), CHUNKS, truncated=True, success=False)
    images = np.stack([picture(hand, block) for hand in hands])
    return replace(played, images=images, proprio=hands)


def frames_of(played: Trajectory) -> FrameEpisode:
    return FrameEpisode.of(played, played.proprio)


@pytest.fixture(scope="module", params=[COMPOSED, DIFFUSION], ids=lambda config: config.frame_model)
def config(request) -> WorldModelConfig:
    return request.param


@pytest.fixture(scope="module")
def trained(config) -> FrameTrainer:
    trainer = FrameTrainer(config, seed=0)
    for number in range(40):
        trainer.learn(frames_of(moving(number)))
    return trainer


def predict(trainer: FrameTrainer, played: Trajectory, after: np.ndarray) -> np.ndarray:
    first, task = np.repeat(played.images[:1], CHUNKS, axis=0), np.full(CHUNKS, played.episode.task)
    return trainer.predict(played.images[:-1], first, task, played.proprio[:-1], after)


@pytest.mark.parametrize(
    "model",
    [
        ComposedFrames(views=2, proprio=3, width=4),
        DiffusionFrames(views=2, proprio=3, width=32, depth=1, patch=8, steps=3),
    ],
    ids=lambda model: type(model).__name__,
)
def test_before_training_a_frame_is_nearly_copied(model):
    generator = torch.Generator().manual_seed(0)
    frames = [torch.randint(256, (5, 2, 20, 28, 3), generator=generator).to(torch.uint8) for _ in range(3)]
    inputs = FrameInputs(*frames, *torch.randn(3, 5, 3, generator=generator))
    made = model(inputs)
    assert made.shape == frames[0].shape, "sides need not be multiples of a patch"
    assert (made - inputs.current / 255).abs().mean() < 0.2 * (made - inputs.first / 255).abs().mean()
    assert torch.equal(made, model(inputs)), "nothing is drawn"
    model.loss(inputs, frames[1], generator).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_model_that_knows_the_frame_denoises_to_it():
    model = DiffusionFrames(views=1, proprio=2, width=32, depth=1, patch=8, steps=4)
    after = torch.rand(2, 3, 16, 16) * 2 - 1
    model._denoise = lambda noisy, t, sources, inputs: after
    frame = torch.zeros(2, 1, 16, 16, 3, dtype=torch.uint8)
    made = model(FrameInputs(frame, frame, frame, *torch.zeros(3, 2, 2)))
    assert torch.allclose(made[:, 0], (after.permute(0, 2, 3, 1) + 1) / 2, atol=1e-6)


def test_new_episodes_are_predicted_better_than_by_copying_or_for_other_chunks(trained):
    sums = np.zeros(3)
    for number in range(100, 120):
        played = moving(number)
        real = torch.from_numpy(played.images[1:])
        changed = changed_pixels(torch.from_numpy(played.images[:-1]), real)
        other = np.roll(played.proprio[1:], 1, axis=0)
        for i, made in enumerate((predict(trained, played, played.proprio[1:]), played.images[:-1])):
            sums[i] += (torch.from_numpy(made).float() - real.float()).abs().mean(-1)[changed].sum().item()
        shuffled = torch.from_numpy(predict(trained, played, other)).float()
        sums[2] += (shuffled - real.float()).abs().mean(-1)[changed].sum().item()
    assert sums[0] < 0.5 * sums[1]
    assert sums[0] < 0.5 * sums[2]


def test_the_nearest_frame_is_of_another_episode_and_of_the_same_task():
    archive = FrameArchive(8)
    for number in range(4):
        archive.add(frames_of(moving(number)))
    inputs, after = archive.sample(64, torch.Generator().manual_seed(1))
    assert not (inputs.nearest_proprio == inputs.next_proprio).all(dim=1).any(), "its own frame"
    by_place = {tuple(p.tolist()): e.task for e in archive.episodes for p in e.proprio}
    for own, nearest in zip(inputs.proprio.tolist(), inputs.nearest_proprio.tolist(), strict=True):
        assert by_place[tuple(own)] == by_place[tuple(nearest)]
    known = archive.inputs(after[:1].numpy(), after[:1].numpy(), np.zeros(1), *[archive.episodes[0].proprio[:1]] * 2)
    assert torch.equal(known.nearest[0], torch.from_numpy(archive.episodes[0].images[0])), "of all that were played"


def test_a_resumed_frame_model_goes_on_as_the_other(config, trained, tmp_path):
    counters = trained.save(tmp_path)
    other = FrameTrainer(config, seed=1)
    other.load(tmp_path, counters)
    played = moving(200)
    for trainer in (trained, other):
        trainer.learn(frames_of(moving(201)))
    made = [predict(trainer, played, played.proprio[1:]) for trainer in (trained, other)]
    assert np.array_equal(*made)
    assert trained.loss == other.loss


class Places:
    """In place of encoder and ensemble: features and the likely chunk are what the frame shows of the hand; a chunk's
    first two numbers are where it leads."""

    ready = True

    def encode(self, images, proprio, task, elapsed):
        yellow = (images[:, 0, :, :, 2].astype(int) < 80) & (images[:, 0, :, :, 1] > 150)
        rows, columns = np.arange(SIZE)[:, None], np.arange(SIZE)
        count = np.maximum(yellow.sum((1, 2)), 1)
        return np.stack([(yellow * columns).sum((1, 2)) / count, (yellow * rows).sum((1, 2)) / count], 1).astype("f4")

    def likely_chunks(self, features):
        return features

    def standardized(self, proprio):
        return proprio

    def rate(self, features, proprio, elapsed, actions):
        n = len(actions)
        return ChunkRating(np.zeros(n), np.zeros(n), np.zeros((n, 1)), np.ones(n), actions[:, 0, :2])


def as_episode(played: Trajectory, places: Places) -> Episode:
    actions = np.zeros((CHUNKS, 1, 2), np.float32)
    actions[:, 0] = played.proprio[1:]
    features = places.encode(played.images, None, None, None)
    return Episode(
        features, played.proprio, played.elapsed[:CHUNKS], actions, np.zeros(CHUNKS), np.zeros(CHUNKS), False
    )


def judged(frames: FrameTrainer, *, misled: bool = False) -> Futures:
    places = Places()
    futures = Futures(places, frames, places, HorizonGate(3, most_gap=0.5), 3)
    for number in range(300, 330):
        played = moving(number)
        episode = as_episode(played, places)
        if misled:
            episode = replace(episode, actions=np.roll(episode.actions, 2, axis=0))
        futures.judge(played, episode)
    return futures


def test_the_horizon_grows_where_predictions_are_right_and_not_where_they_are_wrong(config, trained, tmp_path):
    right, wrong = judged(trained), judged(trained, misled=True)
    assert right.horizon == 3, right.gate.depths()
    assert wrong.horizon == 1, wrong.gate.depths()
    assert right.metrics()["depth1_gap"] < 0.5 < wrong.metrics()["depth1_gap"]
    state = right.save(tmp_path)
    other = Futures(Places(), FrameTrainer(config, seed=1), Places(), HorizonGate(3, most_gap=0.5), 3)
    assert other.horizon == 1, "there is no frame model yet"
    other.load(tmp_path, state)
    assert other.horizon == 3
    pictures = read_futures(tmp_path / "futures.npz")
    assert pictures
    assert all(f.real.shape == f.predicted.shape for f in pictures)
    assert all(np.array_equal(f.real[0], f.predicted[0]) for f in pictures), "a real state"


def test_too_few_predictions_do_not_pass():
    gate, good = HorizonGate(4, most_gap=0.5), Prediction(10, 1.0, 3.0, 2.0, 0.1, 1.0)
    gate.add(1, [good] * LEAST_PREDICTIONS)
    gate.add(2, [good] * (LEAST_PREDICTIONS - 1))
    gate.add(3, [good] * LEAST_PREDICTIONS)
    assert [depth.passed for depth in gate.depths()] == [True, False, True]
    assert gate.horizon == 2, "depths pass in a row"
    gate.add(2, [good])
    assert gate.horizon == 4


@pytest.mark.parametrize("bad", [{"predicted": 3.5}, {"predicted": 2.5}, {"gap": 0.6}])
def test_each_comparison_can_fail_the_gate(bad):
    gate = HorizonGate(2, most_gap=0.5)
    gate.add(1, [replace(Prediction(10, 1.0, 3.0, 2.0, 0.1, 1.0), **bad)] * LEAST_PREDICTIONS)
    assert gate.horizon == 1
