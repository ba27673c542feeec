"""Env workers, inference servers and the store together, in threads of one process: no Ray, no model."""

import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from envs.workload.config import WorkloadConfig
from envs.workload.env import WorkloadVectorEnv, decode_image, plan_episode
from tests.runtime_fakes import POLICY, A, EchoPolicy
from vla_rl.cluster.processes.faults import Crash, unreliable
from vla_rl.core.errors import NotFiniteError
from vla_rl.core.faults import VARIABLE, order
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, create_pool
from vla_rl.core.records import STATE, STATE_AFTER, ActionBatch, Observation
from vla_rl.inference.inference_server import BatchRule, InferenceServer
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.schedule import evaluation_episodes
from vla_rl.replay.store import ReplayStore
from vla_rl.rollout.env_worker import EnvWorker

K = 4


class EpisodePolicy(EchoPolicy):
    def act(self, observation: Observation, draws: Mapping[str, np.ndarray], greedy: np.ndarray) -> ActionBatch:
        n = len(observation.task)
        self.batches.append(n)
        episodes = [decode_image(image[0])[0] for image in observation.images]
        return ActionBatch(
            actions=np.zeros((n, K, A), np.float32),
            record={"tokens": np.asarray(episodes)[:, None, None].repeat(K, 1).repeat(A, 2).astype(np.uint8)},
            logprobs=draws["uniforms"].copy(),
            values=np.full(n, 0.25, np.float32),
            policy_version=self.version,
        )


@dataclass
class System:
    store: ReplayStore
    workers: list[EnvWorker]
    policy: EpisodePolicy
    threads: list[threading.Thread] = field(default_factory=list)


@contextmanager
def running(
    tmp_path,
    config,
    *,
    workers=2,
    envs_per_worker=3,
    splits=None,
    batch_episodes=8,
    max_staleness=3,
    policy=None,
    final="truncated",
    simulator=WorkloadVectorEnv,
    keeps_state=False,
):
    """A started system; everything must end within seconds of being told to."""
    store = ReplayStore(StoreRules(batch_episodes, max_staleness, 2, 12, 0, iterations=1000))
    address = PoolAddress(str(tmp_path), "server0", workers, envs_per_worker)
    policy = policy or EpisodePolicy()
    envs = [simulator(config, envs_per_worker) for _ in range(workers)]
    create_pool(address, envs[0].spec, POLICY)
    server = InferenceServer(policy, ServerMailbox(address), BatchRule(workers * envs_per_worker, 0.002))
    players = [
        EnvWorker(
            w, env, WorkerMailbox(address, w), store, POLICY, splits or envs_per_worker, final, keeps_state=keeps_state
        )
        for w, env in enumerate(envs)
    ]
    system = System(store, players, policy, [threading.Thread(target=c.run) for c in (server, *players)])
    for thread in system.threads:
        thread.start()
    try:
        yield system
    finally:
        for component in (*players, server, store):
            component.stop()
        for thread in system.threads:
            thread.join(10.0)
            assert not thread.is_alive(), "a loop did not end"


class WithState(WorkloadVectorEnv):
    """Whose state is the number of the episode, and the control steps executed."""

    def state(self, env_ids):
        found = [self.instance(env_id) for env_id in env_ids]
        return np.array([[instance.episode.id, instance.steps] for instance in found], np.float32)


def test_the_simulators_state_is_recorded_around_each_chunk(tmp_path):
    config = WorkloadConfig(max_episode_steps=21, length_spread=0.9)
    with running(tmp_path, config, splits=1, simulator=WithState, keeps_state=True) as system:
        batch = system.store.next_batch(20.0)
    for b, rows in enumerate(map(slice, batch.offsets[:-1], batch.offsets[1:])):
        steps = np.cumsum(batch.num_steps[rows])
        assert (batch.record[STATE][rows, 0] == batch.record[STATE][rows, 0][0]).all(), b
        assert batch.record[STATE_AFTER][rows, 1].tolist() == steps.tolist()
        assert batch.record[STATE][rows, 1].tolist() == [0, *steps[:-1].tolist()]


@pytest.mark.parametrize(("splits", "final"), [(1, "truncated"), (3, "truncated"), (3, "never"), (1, "always")])
def test_what_the_simulator_wrote_is_what_is_trained_on(tmp_path, splits, final):
    config = WorkloadConfig(max_episode_steps=21, length_spread=0.9)
    kinds = set()
    with running(tmp_path, config, splits=splits, final=final) as system:
        for version in range(4):
            batch = system.store.next_batch(20.0)
            assert batch is not None
            for b in range(batch.num_episodes):
                rows = slice(batch.offsets[b], batch.offsets[b + 1])
                episode = int(batch.episode_id[b])
                images = batch.images[batch.obs_row[rows]]
                seen = [decode_image(image[0]) for image in images]
                assert seen == [(episode, K * i) for i in range(len(seen))]
                assert (batch.record["tokens"][rows] == episode % 256).all(), "an answer went to another episode"
                length = int(batch.num_steps[rows].sum())
                assert (batch.num_steps[rows][:-1] == K).all()
                assert length <= config.max_episode_steps
                kinds.add(bool(batch.truncated[b]))
                if final == "always" or (final == "truncated" and batch.truncated[b]):
                    assert decode_image(batch.images[batch.final_obs_row[b]][0]) == (episode, length)
                    assert batch.bootstrap_value[b] == 0.25
                else:
                    assert (batch.final_obs_row[b], batch.bootstrap_value[b]) == (-1, 0.0)
            system.store.advance(version + 1)
    assert kinds == {True, False}


def test_episodes_end_where_they_end(tmp_path):
    """Law 4: executed steps are exactly the episodes' lengths, whatever the chunk size."""
    config = WorkloadConfig(max_episode_steps=23, length_spread=0.8)
    with running(tmp_path, config, max_staleness=0) as system:
        batch = system.store.next_batch(20.0)
        from vla_rl.replay.schedule import training_episode

        for b, episode in enumerate(batch.episode_id.tolist()):
            plan = plan_episode(config, training_episode(episode, episode % 2, 0).seed)
            rows = slice(batch.offsets[b], batch.offsets[b + 1])
            assert batch.num_steps[rows].sum() == plan.length
            assert (batch.success[b], batch.truncated[b]) == (plan.success, plan.truncated)
        steps = sum(w.meter.counts["env_steps"] for w in system.workers)
        assert steps == batch.num_steps.sum(), "the gate was closed: no other episode ran"


def test_elapsed_time_is_the_share_of_the_time_limit_that_was_executed_before(tmp_path):
    """Of every chunk, and of the final observation, before which a chunk may have stopped early."""
    config = WorkloadConfig(max_episode_steps=22, length_spread=0.8)
    with running(tmp_path, config, final="always", max_staleness=0) as system:
        batch = system.store.next_batch(20.0)
    assert len(set(np.diff(batch.offsets).tolist())) > 1, "episodes of different lengths"
    for b in range(batch.num_episodes):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        executed = np.append(0, np.cumsum(batch.num_steps[rows]))
        assert batch.elapsed[[*batch.obs_row[rows], batch.final_obs_row[b]]] == pytest.approx(executed / 22)


def test_sampling_noise_belongs_to_the_episode(tmp_path):
    """The same episode meets the same random numbers, whatever the envs_per_worker, workers and batches."""
    config = WorkloadConfig(max_episode_steps=12, length_spread=0.5)
    draws = []
    for name, workers, envs_per_worker in (("a", 1, 1), ("b", 2, 4)):
        (tmp_path / name).mkdir()
        with running(
            tmp_path / name, config, workers=workers, envs_per_worker=envs_per_worker, max_staleness=0
        ) as system:
            batch = system.store.next_batch(20.0)
        draws.append(
            {int(e): batch.logprobs[batch.offsets[b] : batch.offsets[b + 1]] for b, e in enumerate(batch.episode_id)}
        )
    assert draws[0].keys() == draws[1].keys()
    assert all(np.array_equal(draws[0][e], draws[1][e]) for e in draws[0])
    assert len({x[0, 0, 0].item() for x in draws[0].values()}) == 8


def test_nothing_waits_for_the_slowest(tmp_path):
    """One worker is 20 times slower; the other goes on alone, and environments refill while episodes are under way."""
    config = WorkloadConfig(max_episode_steps=8, step_ms=0.2)
    with running(tmp_path, config, envs_per_worker=2, batch_episodes=16, max_staleness=8) as system:
        slow = system.workers[0].env
        step = slow.step
        slow.step = lambda *a: (time.sleep(0.2), step(*a))[1]
        batch = system.store.next_batch(20.0)
        assert batch is not None
        assert system.workers[1].meter.counts["episodes"] > 3 * max(1, system.workers[0].meter.counts["episodes"])


def test_evaluation_episodes_come_back_with_frames_and_versions(tmp_path):
    config = WorkloadConfig(max_episode_steps=8)
    policy = EpisodePolicy()
    policy.version = 5
    with running(tmp_path, config, policy=policy, max_staleness=0) as system:
        system.store.assign_evaluation(evaluation_episodes(0, 10, 2, 50, seed=3))
        results = system.store.evaluation_results(10, 20.0)
        assert len(results) == 10
        assert {(r.oldest_policy_version, r.newest_policy_version) for r in results} == {(5, 5)}
        assert {r.steps for r in results} == {8}


def test_idle_workers_use_no_processor_time(tmp_path):
    config = WorkloadConfig(max_episode_steps=8)
    with running(tmp_path, config, max_staleness=0) as system:
        assert system.store.next_batch(20.0) is not None  # the gate is closed now
        time.sleep(0.2)
        used = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - used < 0.15


class _BrokenSource:
    """Gives one episode, and then fails as a store that does not answer."""

    def __init__(self) -> None:
        self.given = False

    def take(self, worker: int, count: int, timeout: float) -> list:
        if self.given:
            raise TimeoutError("the store does not answer")
        self.given = True
        return evaluation_episodes(0, 1, 2, 50, seed=3)

    def add(self, worker: int, finished: object) -> None:
        raise AssertionError("no server answers: nothing is finished")


def test_a_worker_that_gets_no_more_episodes_fails(tmp_path):
    """Silence would leave its environments idle for the rest of the run."""
    address, env = PoolAddress(str(tmp_path), "server0", 1, 2), WorkloadVectorEnv(WorkloadConfig(), 2)
    create_pool(address, env.spec, POLICY)
    with pytest.raises(TimeoutError, match="the store does not answer"):
        EnvWorker(0, env, WorkerMailbox(address, 0), _BrokenSource(), POLICY, 2).run()


@pytest.mark.parametrize("kind", ["exception", "nan_observation"])
def test_a_simulator_that_fails_ends_its_worker_before_anything_spreads(tmp_path, monkeypatch, kind):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    order(tmp_path, kind)
    (tmp_path / "pool").mkdir()
    store = ReplayStore(StoreRules(8, 3, 2, 12, 0, iterations=1000))
    address = PoolAddress(str(tmp_path / "pool"), "server0", 1, 2)
    env = unreliable(WorkloadVectorEnv(WorkloadConfig(step_ms=0.0), 2))
    create_pool(address, env.spec, POLICY)
    server = InferenceServer(EpisodePolicy(), ServerMailbox(address), BatchRule(2, 0.002))
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        with pytest.raises(Crash if kind == "exception" else NotFiniteError, match="simulator"):
            EnvWorker(0, env, WorkerMailbox(address, 0), store, POLICY, 2).run()
    finally:
        server.stop()
        serving.join(10.0)
        store.stop()
    assert store.worker_lost(0) == 2
    assert store.counters()["played"] == 0
