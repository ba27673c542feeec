"""Imagined episodes in the replay store: their place in super-batches, and a ledger of their own."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.replay.test_store import _balanced
from tests.runtime_fakes import trajectory
from vla_rl.core.records import EpisodeSpec, Trajectory

BRANCHES = 3


def bundle(real: Trajectory, branches: int = BRANCHES) -> list[Trajectory]:
    """``branches`` imagined episodes of one chunk for each chunk of a real one."""
    made = []
    for chunk in range(real.num_chunks):
        for member in range(branches):
            spec = EpisodeSpec(0, real.episode.task, 0, group=-2 - 10 * real.episode.id - chunk, member=member)
            made.append(replace(trajectory(spec, chunks=1), model_version=1, success=False))
    return made


def _imagined_balanced(store) -> bool:
    c = {name.removeprefix("imagined_"): n for name, n in store.counters().items() if name.startswith("imagined_")}
    return c["delivered"] == c["trained"] + c["unused"] + c["lost"] + c["waiting"]


def play(store, count: int, passed: bool = True, chunks: int = 2) -> list[Trajectory]:
    """Real episodes with their bundles."""
    played = [trajectory(e, chunks, store.published_version) for e in store.take(0, count, 0.0)]
    for real in played:
        assert store.add(0, real)
        store.add_imagined(real.episode.id, bundle(real), passed)
    return played


def test_imagined_episodes_come_in_addition_to_real_ones(make_store):
    """And when the audit fails, the run plays no more than it would without a model."""
    store = make_store(branches=BRANCHES, batch_episodes=2, max_staleness=0)
    for version, passed in enumerate((False, True, False)):
        real = play(store, 100, passed)
        assert len(real) == 2, "the gate admits the same number in any case"
        batch = store.next_batch(5.0)
        assert (batch.new_episodes, batch.imagined_episodes) == (2, 2 * 2 * BRANCHES * passed)
        assert batch.real().num_episodes == 2
        assert (batch.model_version == [-1] * 2 + [1] * batch.imagined_episodes).all()
        store.advance(version + 1)
    assert store.counters()["reused"] == 0
    assert store.counters()["imagined_unused"] == 2 * 2 * 2 * BRANCHES
    assert _balanced(store)
    assert _imagined_balanced(store)


def test_reused_episodes_keep_their_place_beside_imagined_ones(make_store):
    """What was imagined is trained once, with the episode's first update."""
    store = make_store(branches=BRANCHES, batch_episodes=2, max_staleness=1, reuse=2)
    for version in range(3):
        play(store, 2)
        batch = store.next_batch(5.0)
        again = 2 * (version > 0)
        sizes = batch.new_episodes, batch.num_episodes - 2 - batch.imagined_episodes, batch.imagined_episodes
        assert sizes == (2, again, 2 * 2 * BRANCHES)
        store.advance(version + 1)
    assert store.counters()["reused"] == 4
    assert _imagined_balanced(store)


def test_a_real_episode_waits_for_its_bundle_only_while_the_audit_passes(make_store):
    store = make_store(branches=BRANCHES, batch_episodes=1, max_staleness=1)
    store._bundles.passed = True
    real = [trajectory(e, 2) for e in store.take(0, 1, 0.0)]
    store.add(0, real[0])
    assert store.next_batch(0.3) is None
    store.add_imagined(real[0].episode.id, bundle(real[0]), True)
    assert store.next_batch(5.0).imagined_episodes == 2 * BRANCHES
    store.advance(1)
    for episode in store.take(0, 1, 0.0):
        store.add(0, trajectory(episode, 2))
    assert store.next_batch(0.3) is None
    store.add_imagined(-1, [], False)  # the model fails: its bundles are not waited for
    batch = store.next_batch(5.0)
    assert (batch.new_episodes, batch.imagined_episodes) == (1, 0)


@pytest.mark.parametrize("seed", range(5))
def test_both_ledgers_add_up_whatever_happens(make_store, seed):
    draw = random.Random(seed)
    store = make_store(branches=2, batch_episodes=6, max_staleness=1, iterations=12)
    version, under_way = 0, []
    for _ in range(400):
        event = draw.choice(["take", "add", "bundle", "lose", "late", "train"])
        if event == "take":
            under_way += store.take(draw.randrange(2), draw.randint(1, 3), 0.0)
        elif event in ("add", "late") and under_way:
            episode = under_way.pop(draw.randrange(len(under_way)))
            real = trajectory(episode, 2, max(0, version - draw.randint(0, 2)))
            store.add(0, real)
            if event == "add":
                store.add_imagined(episode.id, bundle(real, 2), draw.random() < 0.7)
        elif event == "bundle":
            store.add_imagined(10_000, [], draw.random() < 0.7)
        elif event == "lose":
            store.worker_lost(5)
        elif event == "train" and (batch := store.next_batch(0.02)) is not None:
            assert batch.real_chunks == 6 * 2
            assert batch.imagined_episodes <= 6 * 2 * 2
            version += 1
            store.advance(version)
        assert _balanced(store)
        assert _imagined_balanced(store)
    assert version > 2


def test_a_checkpoint_keeps_both_ledgers_and_waits_for_no_lost_bundle(make_store):
    store = make_store(branches=BRANCHES, batch_episodes=2, max_staleness=3)
    store._bundles.passed = True
    real = [trajectory(e, 2) for e in store.take(0, 2, 0.0)]
    store.add(0, real[1])
    store.add_imagined(real[1].episode.id, bundle(real[1]), True)
    store.add(0, real[0])  # no bundle yet
    record, trajectories = store.state()
    after = make_store(branches=BRANCHES, batch_episodes=2, max_staleness=3)
    after.restore(json.loads(json.dumps(record)), trajectories)
    assert _balanced(after)
    assert _imagined_balanced(after)
    after.add_imagined(-1, [], True)
    batch = after.next_batch(5.0)
    assert batch.imagined_episodes == 0
    assert np.isin([t.episode.id for t in real], batch.episode_id).all()
