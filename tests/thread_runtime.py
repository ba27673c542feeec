"""A whole run in one process: env worker, inference server and replay store in threads, the learner in the caller's.

These are the parts that a run has, without Ray, and without the start of a process for each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import make_env
from envs.base import VectorEnv
from vla_rl.config.run_config import RunConfig
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, create_pool
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers
from vla_rl.core.machine import free_port
from vla_rl.inference.inference_server import BatchRule, InferenceServer
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.learner.build import make_learner
from vla_rl.learner.process_group import join_ranks
from vla_rl.policies.build import build_policy
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.schedule import evaluation_episodes
from vla_rl.replay.store import ReplayStore
from vla_rl.rollout.env_worker import EnvWorker

_LIMIT_S = 600.0  # of waiting for episodes, on a machine that does much else


@dataclass
class ThreadRun:
    """What the driver of a run does with its parts."""

    config: RunConfig
    env: VectorEnv
    store: ReplayStore
    learner: Any
    publisher: WeightPublisher
    version: int = 0

    def update(self) -> float:
        """One iteration; returns the success rate of the episodes in its super-batch."""
        batch = self.store.next_batch(_LIMIT_S)
        assert batch is not None, "no episodes"
        self.learner.update(batch)
        self.version += 1
        self.publish()
        return float(batch.success.mean())

    def publish(self) -> None:
        self.learner.publish(self.version, self.publisher)
        self.store.advance(self.version)

    def evaluate(self) -> dict[str, float]:
        """Success of the most likely actions ("greedy") and of "sampled" ones, on the benchmark's placements."""
        count, spec, found = self.config.train.eval_episodes, self.env.spec, {}
        for kind in ("greedy", "sampled"):
            episodes = evaluation_episodes(
                0, count, len(spec.instructions), spec.init_states, self.config.seed, greedy=kind == "greedy"
            )
            self.store.assign_evaluation(episodes)
            results = self.store.evaluation_results(count, _LIMIT_S)
            assert len(results) == count, "some episodes do not end"
            assert {result.newest_policy_version for result in results} == {self.version}
            found[kind] = sum(result.success for result in results) / count
        return found


@contextmanager
def thread_run(config: RunConfig, folder: Path) -> Iterator[ThreadRun]:
    """A run that plays, from random weights or from ``policy.checkpoint``. ``folder``: for its shared memory."""
    algo, count = config.algo, config.placement.envs_per_worker
    env = make_env(config.env, count)
    prompts, policy = algo.prompts(env.spec.instructions), config.policy.spec(env.spec)
    join_ranks(0, 1, ("127.0.0.1", free_port()), "cpu")
    acting, trained = (build_policy(config.policy, env.spec, config.seed, prompts) for _ in range(2))
    ranks: Any = {"rank": 0, "world_size": 1, "device": "cpu", "lease": nullcontext}
    learner = make_learner(config, trained, env.spec, **ranks)
    create_weight_buffers(folder / "weights", learner.published_nbytes())
    store = ReplayStore(StoreRules.of(config, env.spec), is_open=False)
    run = ThreadRun(config, env, store, learner, WeightPublisher(folder / "weights"))
    run.publish()
    address = PoolAddress(str(folder), "server0", 1, count)
    create_pool(address, env.spec, policy)
    runner = PolicyRunner(acting, config, WeightReader(folder / "weights"), "cpu")
    server = InferenceServer(runner, ServerMailbox(address), BatchRule(config.placement.max_batch, 0.01))
    worker = EnvWorker(
        0,
        env,
        WorkerMailbox(address, 0),
        store,
        policy,
        2,
        bootstrap_rule=algo.bootstrap_rule,
        teacher=algo.teacher,
        keeps_state=algo.reads_state,
    )
    parts = (worker, server, store)
    threads = [threading.Thread(target=part.run, daemon=True) for part in (worker, server)]
    for thread in threads:
        thread.start()
    store.open()
    try:
        yield run
    finally:
        for part in parts:
            part.stop()
        for thread in threads:
            thread.join(30.0)
        env.close()
