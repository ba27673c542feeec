import json
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.runtime_fakes import result, trajectory
from vla_rl.core.errors import UserError
from vla_rl.core.records import GroupRules
from vla_rl.replay.schedule import TaskSchedule, evaluation_episodes, start_state, training_episode
from vla_rl.replay.store import ReplayStore
from vla_rl.replay.super_batch import collate, describe
from vla_rl.replay.trajectory_file import load_trajectories, save_trajectories


def _balanced(store: ReplayStore) -> bool:
    c = store.counters()
    ended = c["trained"] + c["stale"] + c["filtered"] + c["evaluated"] + c["lost"]
    return c["started"] == ended + c["running"] + c["buffered"] + c["in_training"]


# --- admission and age ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_gate_admits_what_will_be_young_enough(make_store, max_staleness):
    store = make_store(max_staleness=max_staleness)
    assert len(store.take(0, 1000, 0.0)) == (max_staleness + 1) * 4
    assert store.take(0, 1, 0.05) == []
    store.published_version = 1  # a published version opens the gate by one batch
    assert len(store.take(0, 1000, 0.0)) == 4


def test_gate_stays_closed_after_an_update_that_was_not_published(make_store):
    store = make_store(max_staleness=1)
    for episode in store.take(0, 8, 0.0):
        store.add(0, trajectory(episode))
    for update, published in [(1, 0), (2, 2)]:
        assert store.next_batch(5.0).staleness.max() == update - 1
        store.advance(published)
        assert store.counters()["trained"] == 4 * update
        assert store.capacity() == (8 if published else 0)


def test_gate_blocks_and_opens(make_store):
    store = make_store(max_staleness=0)
    for episode in store.take(0, 4, 0.0):
        store.add(0, trajectory(episode))
    got = []
    thread = threading.Thread(target=lambda: got.extend(store.take(0, 2, 10.0)))
    thread.start()
    assert store.next_batch(5.0) is not None
    time.sleep(0.1)
    assert not got
    store.advance(1)
    thread.join(5.0)
    assert len(got) == 2


def test_nothing_is_started_beyond_the_last_iteration(make_store):
    store = make_store(max_staleness=50, iterations=3)
    assert len(store.take(0, 1000, 0.0)) == 12


@pytest.mark.parametrize("drop_stale", [True, False])
def test_too_old_episodes_are_dropped_where_they_would_be_trained_unless_all_are_kept(make_store, drop_stale):
    store = make_store(max_staleness=1, drop_stale=drop_stale)
    episodes = store.take(0, 8, 0.0)
    slow, rest = episodes[0], episodes[1:]
    for episode in rest[:4]:
        store.add(0, trajectory(episode, version=0))
    assert store.next_batch(5.0).policy_version == 0
    store.advance(1)
    for episode in store.take(0, 4, 0.0)[:1] + rest[4:]:
        store.add(0, trajectory(episode, version=1))
    assert store.next_batch(5.0).policy_version == 1
    store.advance(2)
    store.add(0, trajectory(slow, version=0))  # age 2 where it would be trained now
    for episode in store.take(0, 4, 0.0):
        store.add(0, trajectory(episode, version=2))
    batch = store.next_batch(5.0)
    assert (slow.id in batch.episode_id) is not drop_stale
    assert (batch.staleness.max() > 1) == (not drop_stale)
    assert store.counters()["stale"] == drop_stale
    assert _balanced(store)


def test_the_next_batch_is_filled_while_one_is_in_training(make_store):
    store = make_store(max_staleness=2)
    for episode in store.take(0, 8, 0.0):
        store.add(0, trajectory(episode))
    first = store.next_batch(5.0)
    second = store.next_batch(5.0)  # no advance() in between: both were ready
    assert (first.policy_version, second.policy_version) == (0, 1)
    assert not set(first.episode_id) & set(second.episode_id)


# --- workers and evaluations ----------------------------------------------------------------------------------------


def test_a_dead_workers_episodes_are_lost_and_played_again(make_store):
    store = make_store()
    mine, theirs = store.take(0, 2, 0.0), store.take(1, 3, 0.0)
    assert store.worker_lost(1) == 3
    again = store.take(2, 3, 0.0)
    assert [(e.task, e.seed) for e in again] == [(e.task, e.seed) for e in theirs]
    assert not {e.id for e in again} & {e.id for e in theirs}
    store.add(1, trajectory(theirs[0]))  # arrives after its worker was given up
    store.add(0, trajectory(mine[0]))
    assert store.meter.counts["refused"] == 1
    counters = store.counters()
    assert (counters["lost"], counters["buffered"]) == (3, 1)
    assert _balanced(store)


def test_only_the_episode_that_ends_its_worker_again_is_set_aside(make_store):
    """Those that were lost with it twice are played alone, each by an idle worker."""
    store = make_store(max_staleness=5)
    bad, *innocent = store.take(0, 4, 0.0)
    busy = store.take(1, 2, 0.0)
    store.worker_lost(0)
    assert [e.seed for e in store.take(2, 4, 0.0)] == [e.seed for e in (bad, *innocent)], "a first loss is forgiven"
    store.worker_lost(2)
    played, successor = [], 3
    for _ in range(4):
        (episode,) = store.take(successor, 4, 0.0)
        assert store.take(successor, 3, 0.0) == [], "it is alone"
        if episode.seed == bad.seed:
            store.worker_lost(successor)
            successor += 1
        else:
            store.add(successor, trajectory(episode))
            played.append(episode)
    assert [e.seed for e in played] == [e.seed for e in innocent]
    assert store.counters()["set_aside"] == 1
    assert len(store.take(successor, 3, 0.0)) == len(store.take(1, 3, 0.0)) == 3, "all is as before"
    store.add(1, trajectory(busy[0]))
    assert _balanced(store)


def test_busy_workers_are_emptied_for_episodes_that_must_be_played_alone(make_store):
    """As many workers as there are such episodes get no new ones until they are idle: a busy one never plays alone."""
    store = make_store(max_staleness=5)
    (lost,) = store.take(0, 1, 0.0)
    first, second = store.take(1, 2, 0.0), store.take(2, 2, 0.0)
    store.worker_lost(0)
    assert [e.seed for e in store.take(3, 1, 0.0)] == [lost.seed]
    store.worker_lost(3)
    assert store.take(1, 1, 0.0) == []
    assert len(store.take(2, 1, 0.0)) == 1, "one worker is enough"
    for episode in first:
        assert store.take(1, 1, 0.0) == []
        store.add(1, trajectory(episode))
    (again,) = store.take(1, 2, 0.0)
    assert again.seed == lost.seed
    store.add(1, trajectory(again))
    assert len(store.take(1, 2, 0.0)) == 2
    store.add(2, trajectory(second[0]))
    assert _balanced(store)


def test_an_episode_that_is_lost_alone_is_set_aside_with_its_group(make_store):
    """It may be what crashes the simulator; the rest of its group must not wait for it."""
    store = make_store(max_staleness=0, groups=GroupRules(2))
    first, second = store.take(0, 2, 0.0)
    store.add(0, trajectory(second))
    store.take(1, 2, 0.0)  # another group
    store.worker_lost(0)
    for worker in (10, 2):
        (again,) = store.take(worker, 1, 0.0)
        assert (again.seed, again.group, again.member) == (first.seed, first.group, first.member)
        store.worker_lost(worker)
    counters = store.counters()
    assert (counters["set_aside"], counters["lost"], counters["filtered"], counters["buffered"]) == (1, 3, 1, 0)
    store.worker_lost(1)
    assert [e.group for e in store.take(11, 2, 0.0)] == [1, 1]
    store.worker_lost(11)
    assert [e.group for worker in (3, 4) for e in store.take(worker, 4, 0.0)] == [1, 1]
    store.worker_lost(3)
    store.worker_lost(4)
    assert store.counters()["set_aside"] == 2, "the second of a group that was given up is just lost"
    fresh = store.take(5, 4, 0.0)
    assert len(fresh) == 4
    assert not {e.group for e in fresh} & {0, 1}, "others take their place"
    assert _balanced(store)
    record, trajectories = store.state()
    assert record["set_aside"] == 2
    resumed = make_store(max_staleness=0, groups=GroupRules(2))
    resumed.restore(record, trajectories)
    assert resumed.counters()["set_aside"] == 2
    assert _balanced(resumed)


def test_no_episode_is_to_blame_for_the_loss_of_its_host(make_store):
    store = make_store(max_staleness=0)
    mine = [e.seed for e in store.take(0, 4, 0.0)]
    for worker in range(4, 24, 4):
        store.worker_lost(worker - 4, with_host=True)
        assert [e.seed for e in store.take(worker, 4, 0.0)] == mine, "together, as often as that happens"
    store.worker_lost(20)
    assert [e.seed for e in store.take(24, 4, 0.0)] == mine
    store.worker_lost(24)
    (alone,) = store.take(28, 4, 0.0)
    store.worker_lost(28, with_host=True)
    assert [e.seed for e in store.take(32, 4, 0.0)] != [alone.seed], "it goes on to wait for its turn"
    assert store.counters()["set_aside"] == 0
    assert _balanced(store)


def test_a_checkpoint_holds_lost_episodes_that_wait(make_store):
    store = make_store()
    seeds = [e.seed for e in store.take(0, 3, 0.0)]
    store.worker_lost(0)
    resumed = make_store()
    resumed.restore(*store.state())
    assert [e.seed for e in resumed.take(0, 3, 0.0)] == seeds
    assert _balanced(resumed)


def test_an_evaluation_episode_that_is_lost_alone_is_counted_apart(make_store):
    store = make_store()
    store.assign_evaluation(evaluation_episodes(0, 1, 2, 50, seed=0))
    for worker in (0, 1, 3):
        assert [e.evaluation for e in store.take(worker, 1, 0.0)] == [True]
        store.worker_lost(worker)
    (aside,) = store.evaluation_results(1, 0.0)
    assert (aside.set_aside, aside.success, aside.steps) == (True, False, 0)
    assert [e.evaluation for e in store.take(2, 1, 0.0)] == [False], "it is not played again"
    assert (store.counters()["lost"], store.counters()["evaluated"]) == (3, 0)
    assert _balanced(store)


def test_a_dead_workers_waiting_call_takes_nothing(make_store):
    """Ray does not cancel it, and what it took would never be played."""
    store, taken = make_store(max_staleness=0), []
    mine = store.take(0, 4, 0.0)
    waiting = threading.Thread(target=lambda: taken.append(store.take(1, 4, 60.0)))
    waiting.start()
    store.worker_lost(1)
    waiting.join(10.0)
    assert taken == [[]], "it ends at once"
    store.worker_lost(0)
    assert store.take(1, 4, 0.0) == store.take(0, 4, 0.0) == []
    again = [e.seed for worker in (2, 3, 4, 5) for e in store.take(worker, 4, 0.0)]
    assert again == [e.seed for e in mine], "successors play what was lost"
    assert _balanced(store)


def test_a_batch_that_cannot_be_collated_is_an_error_and_not_a_wait(make_store):
    store = make_store()
    for episode in store.take(0, 4, 0.0):
        whole = trajectory(episode)
        store.add(0, replace(whole, proprio=whole.proprio[:, : 1 + episode.id % 2]))  # of unequal widths
    with pytest.raises(RuntimeError, match="the next super-batch could not be formed"):
        store.next_batch(10.0)
    with pytest.raises(RuntimeError, match="could not be formed"):
        store.next_batch(0.0)


def test_evaluations_go_first_and_never_into_a_batch(make_store):
    store = make_store(max_staleness=0)
    store.assign_evaluation(evaluation_episodes(0, 6, 2, 50, seed=0))
    evaluations = store.take(0, 100, 0.0)
    assert [e.evaluation for e in evaluations] == [True] * 6
    training = store.take(0, 100, 0.0)
    assert [e.evaluation for e in training] == [False] * 4
    for episode in evaluations:
        store.add(0, result(episode))
    results = store.evaluation_results(6, 1.0)
    assert sorted(r.episode.id for r in results) == [e.id for e in evaluations]
    assert store.evaluation_results(6, 1.0, known=4) == results[4:]
    assert store.next_batch(0.05) is None
    assert _balanced(store)


def test_waiting_callers_come_back(make_store):
    store = make_store()
    assert store.next_batch(0.05) is None
    assert store.evaluation_results(1, 0.05) == []
    threading.Timer(0.1, store.stop).start()
    start = time.monotonic()
    assert store.next_batch(30.0) is None
    assert time.monotonic() - start < 15


# --- conservation ---------------------------------------------------------------------------------------------------


GROUPS = [GroupRules(), GroupRules(2), GroupRules(4), GroupRules(2, 0.1, 0.9, 3), GroupRules(4, 0.3, 0.8, 50)]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(3))
def test_conservation_through_chaos(make_store, tmp_path, seed, groups):
    """Random takes, finishes, deaths, updates, evaluations and resumes: nothing is lost or counted twice."""
    rng = random.Random(seed)
    store = make_store(max_staleness=rng.choice([0, 1, 3]), groups=groups)
    running: dict[int, list] = {0: [], 1: [], 2: []}
    trained: set[int] = set()
    for _ in range(1200):
        worker = rng.choice(list(running))
        match rng.choice(["take", "take", "finish", "finish", "finish", "die", "update", "evaluate", "resume"]):
            case "take":
                running[worker] += store.take(worker, rng.randint(1, 4), 0.0)
            case "finish" if running[worker]:
                episode = running[worker].pop(rng.randrange(len(running[worker])))
                version = max(0, store.published_version - rng.choice([0, 0, 0, 0, 1, 4]))
                played = trajectory(episode, version=version, success=rng.random() < 0.6)
                store.add(worker, result(episode) if episode.evaluation else played)
            case "die" if rng.random() < 0.05:
                store.worker_lost(worker, with_host=rng.random() < 0.5)
                del running[worker]
                running[worker + 3] = []  # its successor
            case "update":
                batch = store.next_batch(0.005)
                if batch is not None:
                    assert batch.staleness.max() <= store.rules.max_staleness
                    assert batch.policy_version == store.published_version
                    assert not trained & set(batch.episode_id.tolist())
                    assert set(Counter(batch.group.tolist()).values()) == {groups.size}
                    trained |= set(batch.episode_id.tolist())
                    assert _balanced(store)
                    store.advance(store.published_version + 1)
            case "evaluate" if rng.random() < 0.1:
                store.assign_evaluation(evaluation_episodes(0, 3, 2, 50, seed=0))
            case "resume" if rng.random() < 0.05:
                record, trajectories = store.state()
                save_trajectories(tmp_path / "t.npz", trajectories)
                store = make_store(max_staleness=store.rules.max_staleness, groups=groups)
                store.restore(record, load_trajectories(tmp_path / "t.npz"))
                running = {0: [], 1: [], 2: []}
        assert _balanced(store)
    assert store.counters()["trained"] == len(trained)
    assert len(trained) >= 8, "the chaos must not keep the store from working"


def test_restored_store_goes_on_where_it_was(make_store, tmp_path):
    store = make_store(max_staleness=1)
    episodes = store.take(0, 8, 0.0)
    for episode in episodes[:6]:
        store.add(0, trajectory(episode))
    store.next_batch(5.0)
    store.advance(1)
    record, trajectories = store.state()
    save_trajectories(tmp_path / "t.npz", trajectories)
    again = make_store(max_staleness=1)
    again.restore(record, load_trajectories(tmp_path / "t.npz"))
    replayed = again.take(0, 2, 0.0)
    assert [e.seed for e in replayed] == [e.seed for e in episodes[6:]], "what was running is played again, first"
    assert again.capacity() == 2 * 4 - 2 - 2, "the gate counts buffered and running episodes"
    for episode in replayed:
        again.add(0, trajectory(episode, version=1))
    batch = again.next_batch(5.0)
    assert batch.policy_version == 1
    assert set(batch.episode_id[:2]) == {e.id for e in episodes[4:6]}


# --- groups ---------------------------------------------------------------------------------------------------------


def _finish(store: ReplayStore, episodes, successes, version=0) -> None:
    for episode, success in zip(episodes, successes, strict=True):
        store.add(0, trajectory(episode, version=version, success=bool(success)))


def test_another_store_goes_on_from_an_outline(make_store):
    """What was running or waited to be trained is played again; what is being trained stays so."""
    store = make_store(max_staleness=1)
    episodes = store.take(0, 8, 0.0)
    for episode in episodes[:6]:
        store.add(0, trajectory(episode))
    assert store.next_batch(5.0) is not None
    outline = json.loads(json.dumps(store.outline()))
    other = make_store(max_staleness=1)
    other.restore(outline, [])
    counters = other.counters()
    assert {name: counters[name] for name in ("started", "lost", "in_training", "trained")} == {
        "started": 8,
        "lost": 4,
        "in_training": 4,
        "trained": 0,
    }
    assert (counters["played"], counters["succeeded"], counters["control_steps"]) == (6, 6, 6 * 12), "they have been"
    assert _balanced(other)
    again = other.take(0, 8, 0.0)
    lost = [*episodes[6:], *episodes[4:6]]
    assert [replace(e, id=0) for e in again] == [replace(e, id=0) for e in lost], "the gate admits no more"
    other.advance(1)
    assert other.counters()["trained"] == 4
    assert len(other.take(0, 8, 0.0)) == 4
    assert _balanced(other)


def test_groups_begin_whole_and_share_task_and_placement(make_store):
    store = make_store(max_staleness=0, groups=GroupRules(2))
    first = store.take(0, 1, 0.0)
    assert store.capacity() == 2, "the second member of the first group has its place already"
    episodes = first + store.take(0, 10, 0.0)
    assert [(e.group, e.member) for e in episodes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for one, two in (episodes[:2], episodes[2:]):
        assert (one.task, one.seed, one.init_state) == (two.task, two.seed, two.init_state)
    assert episodes[0].seed != episodes[2].seed


def test_a_batch_holds_whole_groups_in_the_order_of_completion(make_store):
    store = make_store(groups=GroupRules(2))
    episodes = store.take(0, 8, 0.0)
    _finish(store, [episodes[i] for i in (0, 2, 4, 7, 6)], [1, 1, 1, 0, 1])
    assert store.next_batch(0.1) is None, "one group is complete, three have a member each"
    _finish(store, [episodes[5]], [0])
    batch = store.next_batch(5.0)
    assert batch.group.tolist() == [3, 3, 2, 2]
    assert batch.episode_id.tolist() == [episodes[i].id for i in (6, 7, 4, 5)]
    assert store.counters()["buffered"] == 2


def test_a_lost_member_is_played_again_in_its_group(make_store):
    store = make_store(max_staleness=0, groups=GroupRules(4))
    mine, theirs = store.take(0, 3, 0.0), store.take(1, 1, 0.0)
    _finish(store, mine, [1, 0, 1])
    store.worker_lost(1)
    again = store.take(0, 4, 0.0)
    assert [(e.group, e.member, e.seed) for e in again] == [(0, 3, theirs[0].seed)]
    _finish(store, again, [0])
    assert set(store.next_batch(5.0).group) == {0}
    assert _balanced(store)


def test_groups_outside_the_bounds_are_replaced_until_the_batch_is_full(make_store):
    store = make_store(max_staleness=0, groups=GroupRules(2, 0.1, 0.9, max_filtered=10))
    for group in range(4):
        episodes = store.take(0, 2, 0.0)
        assert len(episodes) == 2
        _finish(store, episodes, [1, 1] if group % 2 == 0 else [1, 0])
    batch = store.next_batch(5.0)
    assert batch.group.tolist() == [1, 1, 3, 3]
    assert batch.success.tolist() == [True, False] * 2
    assert (store.counters()["filtered"], store.capacity()) == (4, 0)
    store.advance(1)
    assert _balanced(store)


def test_groups_of_equal_returns_are_replaced_and_one_success_among_many_is_not(make_store):
    """DAPO keeps every group with any difference; with shaped rewards, groups without a success may differ, too."""
    store = make_store(max_staleness=0, batch_episodes=16, groups=GroupRules(16, max_filtered=10))
    _finish(store, store.take(0, 16, 0.0), [0] * 16)
    assert store.counters()["filtered"] == 16
    _finish(store, store.take(0, 16, 0.0), [1] + [0] * 15)
    assert store.next_batch(5.0).success.sum() == 1
    store.advance(1)
    for episode in store.take(0, 16, 0.0):
        shaped = trajectory(episode, version=1, success=False)
        shaped.rewards[0, 0] = 0.01 * episode.member
        store.add(0, shaped)
    assert store.next_batch(5.0).success.sum() == 0
    assert store.counters()["filtered"] == 16


def test_where_no_group_qualifies_any_will_do_in_the_end(make_store):
    """A task that always succeeds must not stop the run."""
    store = make_store(max_staleness=0, groups=GroupRules(2, 0.1, 0.9, max_filtered=3))
    for _ in range(5):
        _finish(store, store.take(0, 2, 0.0), [1, 1])
    assert store.next_batch(5.0).group.tolist() == [3, 3, 4, 4]
    store.advance(1)
    for successes in ([1, 1], [1, 0]):
        _finish(store, store.take(0, 2, 0.0), successes, version=1)
    assert store.next_batch(5.0).group.tolist() == [5, 5, 6, 6], "no further group was wasted"
    assert store.counters()["filtered"] == 6
    store.advance(2)
    _finish(store, store.take(0, 2, 0.0), [1, 1], version=2)
    assert store.counters()["filtered"] == 8, "a better one has come, so the count begins again"


def test_a_group_is_as_old_as_its_oldest_member(make_store):
    store = make_store(max_staleness=0, groups=GroupRules(2))
    early = store.take(0, 4, 0.0)
    store.published_version = store._next_version = 1
    _finish(store, early[:1], [1], version=0)
    _finish(store, early[1:], [1, 1, 1], version=1)
    later = store.take(0, 2, 5.0)  # dropping a group makes room for another
    _finish(store, later, [0, 1], version=1)
    assert store.next_batch(5.0).group.tolist() == [1, 1, 2, 2]
    assert store.counters()["stale"] == 2


# --- reuse ----------------------------------------------------------------------------------------------------------


def _train(store: ReplayStore, updates: int) -> list[list[int]]:
    """Play what the gate admits, and train; the episodes of each super-batch."""
    trained = []
    for _ in range(updates):
        for episode in store.take(0, 1000, 0.0):
            store.add(0, trajectory(episode, version=store.published_version))
        batch = store.next_batch(5.0)
        assert batch.staleness.max() <= store.rules.max_staleness
        assert batch.new_episodes == 4
        trained.append(batch.episode_id.tolist())
        store.advance(batch.policy_version + 1)
        assert _balanced(store)
    return trained


def test_every_episode_is_trained_as_often_as_it_is_to_be_reused(make_store):
    store = make_store(max_staleness=2, reuse=3)
    assert _train(store, 5) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7],
        [12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11],
        [16, 17, 18, 19, 8, 9, 10, 11, 12, 13, 14, 15],
    ]
    counts = store.counters()
    assert (counts["trained"], counts["reused"], counts["stale"]) == (20, 4 + 8 * 3, 0)
    assert counts["control_steps"] == 20 * 12


def test_reuse_ends_with_the_bound_on_staleness_for_whole_groups(make_store):
    store = make_store(max_staleness=1, reuse=2, groups=GroupRules(2))
    episodes = store.take(0, 4, 0.0)
    store.published_version = store._next_version = 1
    for episode, version in zip(episodes, (0, 1, 1, 1), strict=True):
        store.add(0, trajectory(episode, version=version))
    assert store.next_batch(5.0).new_episodes == 4
    store.advance(2)
    for episode in store.take(0, 4, 0.0):
        store.add(0, trajectory(episode, version=2))
    assert store.next_batch(5.0).group.tolist() == [2, 2, 3, 3, 1, 1], "one of group 0 would be of age 2"


def test_a_resumed_store_reuses_as_the_other_would_have(make_store):
    straight, broken = make_store(max_staleness=2, reuse=3), make_store(max_staleness=2, reuse=3)
    expected = _train(straight, 5)
    assert _train(broken, 3) == expected[:3]
    record, trajectories = broken.state()
    resumed = make_store(max_staleness=2, reuse=3)
    resumed.restore(json.loads(json.dumps(record)), trajectories)
    assert _train(resumed, 2) == expected[3:]
    assert resumed.counters() == straight.counters()


# --- super-batches --------------------------------------------------------------------------------------------------


def test_collate_keeps_every_row_and_pads_nothing():
    episodes = [training_episode(i, i % 2, 0) for i in range(3)]
    batch = collate(
        [
            trajectory(episodes[0], 2),
            trajectory(episodes[1], 4, truncated=True, success=False),
            trajectory(episodes[2], 1),
        ],
        policy_version=5,
        max_episode_steps=16,
        again=[trajectory(training_episode(9, 0, 0), 3, success=False)],
    )
    assert batch.offsets.tolist() == [0, 2, 6, 7, 10]
    assert batch.obs_row.tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        10,
    ]  # row 6 is the final observation of the truncated episode
    assert batch.final_obs_row.tolist() == [-1, 6, -1, -1]
    assert batch.images[batch.obs_row][:, 0, 0, 0, 0].tolist() == [0, 0, 1, 1, 1, 1, 2, 9, 9, 9]
    assert batch.task.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    assert batch.bootstrap_value.tolist() == [0, 0.5, 0, 0]
    assert batch.staleness.tolist() == [5] * 10
    assert batch.elapsed.tolist() == pytest.approx([0, 1 / 3, 0, 1 / 3, 2 / 3, 1, 4 / 3, 0, 0, 1 / 3, 2 / 3])
    assert (batch.max_episode_steps, batch.new_episodes) == (16, 3)
    assert batch.step_mask.all()
    stats = describe(batch)
    assert (stats["rollout/episodes"], stats["rollout/chunks"], stats["rollout/env_steps"]) == (3, 7, 28)
    assert stats["rollout/success"] == pytest.approx(2 / 3), "of the new episodes"
    assert stats["rollout/return"] == pytest.approx(2 / 3)
    assert stats["rollout/episode_steps"] == pytest.approx(28 / 3)


def test_trajectories_survive_the_disk(tmp_path):
    before = [trajectory(training_episode(i, i % 2, 0), i + 1, truncated=i == 1) for i in range(3)]
    save_trajectories(tmp_path / "t.npz", before)
    after = load_trajectories(tmp_path / "t.npz")
    for a, b in zip(before, after, strict=True):
        assert a.episode == b.episode
        for name in a.__slots__:
            x, y = getattr(a, name), getattr(b, name)
            x, y = (x["tokens"], y["tokens"]) if name == "record" else (x, y)
            assert np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y
            assert not isinstance(x, np.ndarray) or x.dtype == y.dtype


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _garbage(data: bytes) -> bytes:
    return random.Random(0).randbytes(len(data))


def _other_numbers(data: bytes) -> bytes:
    return data.replace(np.float32(0.5).tobytes(), np.float32(0.75).tobytes())


def _unknown_compression(data: bytes) -> bytes:
    at = data.index(b"PK\x01\x02") + 10  # in the first entry of the zip file's directory
    return data[:at] + b"\x63" + data[at + 1 :]


def _without_headers(data: bytes) -> bytes:
    return data.replace(b"headers.npy", b"hemders.npy")


@pytest.mark.parametrize("damage", [_truncated, _garbage, _other_numbers, _unknown_compression, _without_headers])
def test_a_damaged_file_of_trajectories_is_one_clear_error(tmp_path, damage):
    path = tmp_path / "t.npz"
    with pytest.raises(UserError, match=r"t\.npz is missing or damaged .*RUN@ITERATION"):
        load_trajectories(path)
    episode = trajectory(training_episode(0, 0, 0), truncated=True)
    save_trajectories(path, [replace(episode, rewards=np.full_like(episode.rewards, 0.5))])
    assert len(load_trajectories(path)) == 1
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"t\.npz is missing or damaged .*RUN@ITERATION"):
        load_trajectories(path)


def test_headers_that_are_no_headers_are_one_clear_error(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, headers=np.frombuffer(b"[1]", np.uint8))
    with pytest.raises(UserError, match=r"t\.npz is missing or damaged .*RUN@ITERATION"):
        load_trajectories(path)


def test_schedule_depends_on_number_and_seed_only():
    assert training_episode(7, 1, 1) == training_episode(7, 1, 1)
    seeds = {training_episode(i, 0, seed).seed for i in range(100) for seed in (0, 1)}
    assert len(seeds) == 200
    evaluations = evaluation_episodes(10, 100, 2, 50, seed=0)
    assert {(e.task, e.init_state) for e in evaluations} == {(t, s) for t in range(2) for s in range(50)}


def test_tasks_come_in_turn_or_by_their_recent_failures():
    assert [TaskSchedule(3, 0, "in_turn").task(i) for i in range(5)] == [0, 1, 2, 0, 1]
    schedule = TaskSchedule(3, 0, "by_failure")
    start = np.bincount([schedule.task(i) for i in range(3000)], minlength=3)
    assert start.min() > 900, "before anything is known all tasks are alike"
    for _ in range(200):
        schedule.observe(0, True)
        schedule.observe(1, False)
        schedule.observe(2, schedule.task(0) == 0)
    schedule.failure[2] = 0.5
    shares = np.bincount([schedule.task(i) for i in range(3000)], minlength=3) / 3000
    assert shares == pytest.approx(np.array([0.05, 1.05, 0.55]) / 1.65, abs=0.03)
    resumed = TaskSchedule(3, 0, "by_failure")
    resumed.restore(schedule.failure)
    assert [resumed.task(i) for i in range(50)] == [schedule.task(i) for i in range(50)]


def test_every_benchmark_state_comes_once_before_any_comes_again():
    def laps(seed):
        starts = [start_state(number, 2, 5, seed) for number in range(20)]
        return [starts[lap + task : lap + 10 : 2] for lap in (0, 10) for task in (0, 1)]

    assert all(sorted(lap) == [0, 1, 2, 3, 4] for lap in laps(0))
    assert len({tuple(lap) for lap in laps(0)}) > 1, "in another order"
    assert laps(0) == laps(0) != laps(1)


def test_groups_start_from_samples_or_from_benchmark_states(make_store):
    assert {e.init_state for e in make_store(max_staleness=20).take(0, 20, 0.0)} == {None}
    store = make_store(max_staleness=20, groups=GroupRules(2), init_states=5)
    episodes = store.take(0, 20, 0.0)
    assert [(e.task, e.init_state) for e in episodes[::2]] == [(e.task, e.init_state) for e in episodes[1::2]]
    assert {(e.task, e.init_state) for e in episodes} == {(task, state) for task in (0, 1) for state in range(5)}


def test_the_store_prefers_tasks_that_fail_also_after_a_restart(make_store):
    def tasks(store, count):
        return [e.task for e in store.take(0, count, 0.0)]

    store = make_store(max_staleness=100, task_rule="by_failure")
    for _ in range(40):
        for episode in store.take(0, 4, 0.0):
            store.add(0, trajectory(episode, 1, success=episode.task == 0))
    record, trajectories = store.state()
    resumed = make_store(max_staleness=100, task_rule="by_failure")
    resumed.restore(record, trajectories)
    drawn = tasks(store, 60)
    assert 0 < drawn.count(0) < 20
    assert tasks(resumed, 60) == drawn
