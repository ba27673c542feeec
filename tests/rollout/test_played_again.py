"""An episode that is played again from its start, to be filmed, goes as it went: a real policy and simulator."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs import env_spec, make_env
from tests import ROOT
from vla_rl.config.loading import load_config
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, create_pool
from vla_rl.core.records import EpisodeResult, EpisodeSpec
from vla_rl.inference.inference_server import BatchRule, InferenceServer
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.policies.build import build_policy
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.schedule import evaluation_episodes
from vla_rl.replay.store import ReplayStore
from vla_rl.rollout.env_worker import EnvWorker

ENVS = 4


@contextmanager
def running(tmp_path: Path) -> Iterator[ReplayStore]:
    """The tabletop with its warm start, in threads of this process."""
    config = load_config(ROOT / "configs/tabletop.yaml")
    spec = env_spec(config.env)
    policy = config.policy.spec(spec)
    store = ReplayStore(replace(StoreRules.of(config, spec), iterations=0))
    address = PoolAddress(str(tmp_path), "server0", 1, ENVS)
    create_pool(address, spec, policy)
    runner = PolicyRunner(build_policy(config.policy, spec, config.seed), config, None, "cpu")
    server = InferenceServer(runner, ServerMailbox(address), BatchRule(ENVS, 0.002))
    worker = EnvWorker(0, make_env(config.env, ENVS), WorkerMailbox(address, 0), store, policy, ENVS)
    threads = [threading.Thread(target=part.run) for part in (server, worker)]
    for thread in threads:
        thread.start()
    store.open()
    try:
        yield store
    finally:
        for part in (worker, server, store):
            part.stop()
        for thread in threads:
            thread.join(10.0)


def played(store: ReplayStore, episodes: list[EpisodeSpec]) -> dict[int, EpisodeResult]:
    """Results by the seed of the episode."""
    store.assign_evaluation(episodes)
    results = store.evaluation_results(len(episodes), 60.0)
    assert len(results) == len(episodes)
    return {result.episode.seed: result for result in results}


@pytest.mark.parametrize("greedy", [True, False])
def test_a_replay_is_the_same_episode_with_its_frames(tmp_path: Path, greedy: bool) -> None:
    episodes = evaluation_episodes(0, 10, 4, 50, seed=3, greedy=greedy)
    with running(tmp_path) as store:
        first = played(store, episodes)
        chosen = [replace(episode, record=True) for episode in episodes[7:2:-2]]
        again = played(store, chosen)
    assert len({result.success for result in first.values()}) == 2, "some succeed, some fail"
    for seed, replay in again.items():
        ended = [
            (r.success, r.terminated, r.steps, r.total_reward, r.best_progress, r.final_progress)
            for r in (first[seed], replay)
        ]
        assert ended[0] == ended[1]
        assert not first[seed].frames
        assert len(replay.frames) == len(replay.values) == replay.steps
        assert len(set(replay.values)) == -(-replay.steps // 8), "one value for each chunk"
        assert np.abs(np.diff([frame.mean() for frame in replay.frames])).max() > 0, "the scene moves"
