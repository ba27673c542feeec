"""The replay memory: what it keeps, what it draws, and its file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.base.demonstration_records import Demonstrations
from tests.runtime_fakes import A, K, trajectory
from vla_rl.core.errors import UserError
from vla_rl.core.records import STATE, STATE_AFTER
from vla_rl.replay.memory import (
    DrawingRule,
    ReplayMemory,
    StoredEpisode,
    episodes_of,
    episodes_of_demonstrations,
    joined,
)
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.super_batch import collate

ANY = DrawingRule()


def stored(outcomes: list[bool], chunks: int = 3, first: int = 0) -> list[StoredEpisode]:
    """Episodes whose images tell their number; failures were ended by the time limit."""
    made = [
        trajectory(training_episode(first + i, 0, 0), chunks, truncated=not success, success=success)
        for i, success in enumerate(outcomes)
    ]
    batch = collate(made, 0, 100)
    actions = np.repeat(batch.images[batch.obs_row][:, 0, 0, 0, 0], K * A).reshape(-1, K, A).astype(np.float32)
    return episodes_of(batch, actions, batch.truncated, batch.record)


def test_a_transition_belongs_together() -> None:
    memory = ReplayMemory(1e9)
    memory.add(stored([True, False, True]))
    t = memory.sample(500, ANY, np.random.default_rng(0))
    number = t.before.images[:, 0, 0, 0, 0]
    assert set(number.tolist()) == {0, 1, 2}
    assert (t.actions == number[:, None, None]).all()
    assert (t.after.images[:, 0, 0, 0, 0] == number).all()
    row = t.before.proprio[:, 0]
    assert (t.after.proprio[:, 0] == row + 1)[t.continues].all()
    assert (t.continues == ((row < 2) | (number == 1))).all(), "a time limit's last observation has a value"
    assert (t.rewards.sum(axis=(1, 2)) == ((row == 2) & (number != 1))).all()


def test_a_transition_over_three_chunks_ends_with_the_episode_at_the_latest() -> None:
    """Episodes of 5 chunks: number 0 succeeds, and the time limit ends number 1."""
    memory = ReplayMemory(1e9, return_chunks=3)
    memory.add(stored([True, False], chunks=5))
    t = memory.sample(500, ANY, np.random.default_rng(0))
    number, row = t.before.images[:, 0, 0, 0, 0], t.before.proprio[:, 0]
    assert set(row.tolist()) == set(range(5))
    last = np.minimum(row + 3, 5)
    assert (t.continues == ((last < 5) | (number == 1))).all()
    assert (t.after.images[:, 0, 0, 0, 0] == number).all()
    assert (t.after.proprio[:, 0] == last)[t.continues].all()
    assert ((t.steps > 0).sum(axis=1) == last - row).all(), "nothing is executed after the end"
    played = [e.num_steps for e in memory.episodes]
    for i in range(500):
        mine = played[number[i]][int(row[i]) : int(last[i])]
        assert t.steps[i, : len(mine)].tolist() == mine.tolist()
        earned = sum(t.rewards[i, c, :n].sum() for c, n in enumerate(t.steps[i]))
        assert earned == (number[i] == 0 and last[i] == 5)


def test_states_belong_to_their_observations() -> None:
    made = []
    for number, truncated in enumerate((False, True)):
        t = trajectory(training_episode(number, 0, 0), 3, truncated=truncated, success=not truncated)
        before = 10 * number + np.arange(3, dtype=np.float32)[:, None]
        made.append(replace(t, record=t.record | {STATE: before, STATE_AFTER: before + 1}))
    batch = collate(made, 0, 100)
    episodes = episodes_of(batch, np.zeros((6, K, A), np.float32), batch.truncated, {})
    assert [e.state[:, 0].tolist() for e in episodes] == [[0, 1, 2], [10, 11, 12, 13]]
    memory = ReplayMemory(1e9)
    memory.add(episodes)
    t = memory.sample(100, ANY, np.random.default_rng(0))
    assert (t.after.state == t.before.state + 1)[t.continues].all()
    assert memory.states().shape == (7, 1)


@pytest.mark.parametrize(("share", "expected"), [(None, 0.25), (0.5, 0.5), (0.9, 0.9), (0.0, 0.0)])
def test_successes_are_drawn_as_often_as_asked(share: float | None, expected: float) -> None:
    memory = ReplayMemory(1e9)
    memory.add(stored([True, False, False, False]))
    drawn = memory.sample(4000, DrawingRule(share), np.random.default_rng(0)).before.images[:, 0, 0, 0, 0]
    assert np.mean(drawn == 0) == pytest.approx(expected, abs=0.03)
    alone = ReplayMemory(1e9)
    alone.add(stored([False, False]))
    assert len(alone.sample(10, DrawingRule(0.9), np.random.default_rng(0)).task) == 10, "with one kind, that one"


def test_tasks_are_drawn_evenly_among_successes_and_others() -> None:
    """Of task 0 there are many, of task 1 one success, of task 2 one failure."""
    memory = ReplayMemory(1e9)
    many = stored([True, True, True, False, False, False])
    memory.add([*many, *(replace(e, task=1 + i) for i, e in enumerate(stored([True, False], first=6)))])
    t = memory.sample(8000, DrawingRule(0.8, tasks_evenly=True), np.random.default_rng(0))
    for success, shares in ((True, (0.4, 0.4, 0.0)), (False, (0.1, 0.0, 0.1))):
        found = [np.mean((t.success == success) & (t.task == task)) for task in range(3)]
        assert found == pytest.approx(shares, abs=0.02)
    t = memory.sample(8000, DrawingRule(tasks_evenly=True), np.random.default_rng(0))
    assert [np.mean(t.task == task) for task in range(3)] == pytest.approx([1 / 3] * 3, abs=0.02)


def test_an_episode_is_drawn_half_as_often_after_its_half_life() -> None:
    memory = ReplayMemory(1e9)
    memory.add(stored([True] * 7))
    drawn = memory.sample(20_000, DrawingRule(half_life=3), np.random.default_rng(0)).before.images[:, 0, 0, 0, 0]
    counts = np.bincount(drawn, minlength=7)
    assert counts[6] / counts[3] == pytest.approx(2.0, rel=0.1)
    assert counts[6] / counts[0] == pytest.approx(4.0, rel=0.1)
    memory.add(stored([False] * 3000, first=7))
    t = memory.sample(1000, DrawingRule(0.5, half_life=1), np.random.default_rng(0))
    assert np.mean(t.success) == pytest.approx(0.5, abs=0.05), "successes keep their share, however old they are"


def test_the_oldest_are_forgotten_and_the_newest_never() -> None:
    size = stored([True])[0].nbytes
    memory = ReplayMemory(2.5 * size)
    for first in range(4):
        memory.add(stored([True], first=first))
    drawn = memory.sample(100, ANY, np.random.default_rng(0)).before.images[:, 0, 0, 0, 0]
    assert set(drawn.tolist()) == {2, 3}
    found = memory.metrics()
    assert (found["memory_episodes"], found["memory_forgotten"], found["memory_chunks"]) == (2, 2, 6)
    small = ReplayMemory(0.1 * size)
    small.add(stored([True, True]))
    assert len(small) == 1
    with pytest.raises(ValueError, match="empty"):
        ReplayMemory(1.0).sample(1, ANY, np.random.default_rng(0))


def test_it_is_read_back_as_it_was(tmp_path: Path) -> None:
    memory, again = ReplayMemory(1e9), ReplayMemory(1e9)
    memory.add([*stored([True, False]), *stored([False], chunks=2, first=7)])
    memory.save(tmp_path / "memory.npz")
    again.load(tmp_path / "memory.npz")
    assert again.metrics() == memory.metrics()
    for share in (None, 0.5):
        drawn = [m.sample(50, DrawingRule(share), np.random.default_rng(3)) for m in (memory, again)]
        for name in ("task", "actions", "rewards", "steps", "continues", "success"):
            assert np.array_equal(getattr(drawn[0], name), getattr(drawn[1], name))
        assert np.array_equal(drawn[0].after.images, drawn[1].after.images)
        assert np.array_equal(drawn[0].record["tokens"], drawn[1].record["tokens"])
        assert (drawn[0].record["tokens"][:, 0, 0] == drawn[0].before.images[:, 0, 0, 0, 0]).all()
    (tmp_path / "memory.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match="damaged"):
        again.load(tmp_path / "memory.npz")


def test_each_row_of_a_demonstration_begins_one_chunk() -> None:
    lengths = 6, 3
    rows = np.arange(sum(lengths))
    images = np.broadcast_to(rows[:, None, None, None, None], (9, 1, 4, 4, 3)).astype(np.uint8)
    actions = np.broadcast_to(rows[:, None], (9, A)).astype(np.float32)
    proprio, task = rows[:, None].astype(np.float32), (rows >= 6).astype(np.int32)
    demos = Demonstrations(images, proprio, actions, task, np.array([0, 6, 9]))
    chunks, mask = demos.chunks(K)
    memory = ReplayMemory(math.inf)
    memory.add(episodes_of_demonstrations(demos, chunks, mask, 10, {"tokens": 2 * chunks}))
    t = memory.sample(600, ANY, np.random.default_rng(0))
    row = t.before.images[:, 0, 0, 0, 0].astype(int)
    assert set(row.tolist()) == set(rows.tolist())
    end = np.where(row < 6, 6, 9)
    assert (t.num_steps == np.minimum(K, end - row)).all()
    assert (t.actions[:, 0, 0] == row).all()
    assert (t.continues == (row + K < end)).all()
    assert (t.after.images[:, 0, 0, 0, 0] == row + K)[t.continues].all()
    assert (t.rewards.sum(axis=(1, 2)) == (row + K >= end)).all()
    assert (t.rewards[np.arange(600), 0, t.num_steps - 1] == (row + K >= end)).all(), "with the last executed step"
    assert np.allclose(t.before.elapsed, np.where(row < 6, row, row - 6) / 10)
    assert (t.record["tokens"] == 2 * t.actions).all()
    both = joined([t, memory.sample(2, ANY, np.random.default_rng(1))])
    assert len(both.task) == len(both.before.images) == len(both.after.elapsed) == 602
