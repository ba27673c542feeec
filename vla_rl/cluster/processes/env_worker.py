"""The process of an env worker."""

from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from vla_rl.cluster.processes.common import CALL_TIMEOUT_S, PulseAddress, device_lease
from vla_rl.config.run_config import RunConfig
from vla_rl.core.ipc.mailbox import PoolAddress
from vla_rl.core.records import EpisodeResult, EpisodeSpec, Trajectory
from vla_rl.placement.plan import Plan, Process


class StoreClient:
    """The replay store as an env worker sees it (``AssignmentSource``)."""

    def __init__(self, store: ActorHandle) -> None:
        self._store = store

    def take(self, worker: int, count: int, timeout: float) -> list[EpisodeSpec]:
        return ray.get(self._store.take.remote(worker, count, timeout), timeout=timeout + CALL_TIMEOUT_S)

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None:
        self._store.add.remote(worker, finished)


class EnvWorkerProcess:
    def __init__(self, config: RunConfig, process: Process, number: int, lock_server: Path) -> None:
        """``number``: by which the store knows this worker, and none of those that it replaces."""
        self._config, self._process, self._number, self._lock_server = config, process, number, lock_server
        self._worker: Any = None

    def run(self, address: PoolAddress, position: int, plan: Plan, store: ActorHandle, pulse: PulseAddress) -> None:
        """Build everything in the thread that will use it (an OpenGL context belongs to one thread), then play.

        ``position``: of this worker among those of its inference server.
        """
        progress = pulse.open(self._process)
        progress.expect(pulse.setup_s)
        from envs import make_env
        from envs.base.shaping import shaped
        from vla_rl.cluster.processes.faults import unreliable
        from vla_rl.core.ipc.mailbox import WorkerMailbox
        from vla_rl.rollout.env_worker import EnvWorker

        config = self._config
        env = make_env(config.env, plan.envs_per_worker)
        if config.log.dataset is not None:
            from envs.base.recorder import RecordedEnv

            evaluations_only = config.log.dataset_episodes == "evaluations"
            env = RecordedEnv(env, Path(config.log.dataset), evaluations_only=evaluations_only)
        env = unreliable(shaped(env, config.env.shaping))
        self._worker = EnvWorker(
            worker=self._number,
            env=env,
            mailbox=WorkerMailbox(address, position),
            assignments=StoreClient(store),
            policy=config.policy.spec(env.spec),
            splits=plan.splits,
            # a world model learns what the last chunk led to
            bootstrap_rule=config.algo.bootstrap_rule if config.world_model is None else "always",
            lease=device_lease(self._process, self._lock_server),
        )
        self._worker.meter.observer = progress
        try:
            self._worker.run()
        finally:
            progress.rest()

    def stats(self) -> dict[str, float]:
        return self._worker.meter.snapshot() if self._worker else {}

    def stop(self) -> None:
        if self._worker:
            self._worker.stop()
