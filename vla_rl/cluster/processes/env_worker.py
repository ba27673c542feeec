"""The process of an env worker."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from vla_rl.cluster.processes.common import CALL_TIMEOUT_S, Notes, PulseAddress, Traced, device_lease
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import StallError
from vla_rl.core.ipc.mailbox import PoolAddress
from vla_rl.core.records import EpisodeResult, EpisodeSpec, Trajectory
from vla_rl.placement.plan import Plan, Process


class StoreClient:
    """The replay store as an env worker sees it (``AssignmentSource``)."""

    def __init__(self, store: ActorHandle) -> None:
        self._store = store
        self._sent: list[Any] = []  # calls that bring episodes to it

    def take(self, worker: int, count: int, timeout: float) -> list[EpisodeSpec]:
        """Raises StallError if the store says nothing."""
        limit = timeout + CALL_TIMEOUT_S
        try:
            return ray.get(self._store.take.remote(worker, count, timeout), timeout=limit)
        except GetTimeoutError:
            text = f"the replay store has not answered for {limit:.0f} s: is the machine overloaded?"
            raise StallError(text) from None

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> None:
        """Raises RayActorError if an earlier episode has not arrived: this worker then ends, and that one is lost."""
        arrived, self._sent = ray.wait(self._sent, num_returns=len(self._sent), timeout=0.0) if self._sent else ([], [])
        ray.get(arrived)
        self._sent.append(self._store.add.remote(worker, finished))


class EnvWorkerProcess(Traced):
    def __init__(self, config: RunConfig, process: Process, lock_server: Path) -> None:
        self._config, self._process, self._lock_server = config, process, lock_server
        self.record_spans(process, config.log.trace)
        self._thread = ThreadPoolExecutor(1, "simulator")  # of all runs: an OpenGL context belongs to one thread
        self._env: Any = None
        self._keeps_env = False
        self._worker: Any = None
        self._notes = Notes()

    def run(
        self, number: int, address: PoolAddress, position: int, plan: Plan, store: ActorHandle, pulse: PulseAddress
    ) -> None:
        """Play until ``stop``; after an error, with new simulators.

        ``number``: by which the store knows this worker, and none of those that it replaces. ``position``: of this
        worker among those of its inference server.
        """
        self._thread.submit(self._run, number, address, position, plan, store, pulse).result()

    def _run(
        self, number: int, address: PoolAddress, position: int, plan: Plan, store: ActorHandle, pulse: PulseAddress
    ) -> None:
        progress = pulse.open(self._process)
        progress.expect(pulse.setup_s)
        from vla_rl.core.ipc.mailbox import WorkerMailbox
        from vla_rl.rollout.env_worker import EnvWorker

        config, mailbox = self._config, WorkerMailbox(address, position)
        self._env, self._keeps_env = self._env or self._make_env(plan.envs_per_worker), False
        self._worker = EnvWorker(
            worker=number,
            env=self._env,
            mailbox=mailbox,
            assignments=StoreClient(store),
            policy=config.policy.spec(self._env.spec),
            splits=plan.splits,
            # a world model learns what the last chunk led to
            bootstrap_rule=config.algo.bootstrap_rule if config.world_model is None else "always",
            lease=device_lease(self._process, self._lock_server, self.spans),
            teacher=config.algo.teacher,
            keeps_state=config.algo.reads_state,
        )
        self._worker.meter.observer, self._worker.meter.spans = progress, self.spans
        try:
            self._worker.run()
        except RayActorError:  # the store is gone, and the simulator is well
            self._keeps_env = True
            raise
        finally:
            progress.rest()
            self._worker = None
            mailbox.close()
            if not self._keeps_env:
                self._env.close()
                self._env = None

    def _make_env(self, count: int) -> Any:
        from envs import make_env
        from envs.base.real_time import paced
        from envs.base.shaping import shaped
        from vla_rl.cluster.processes.faults import unreliable

        log = self._config.log
        env = make_env(self._config.env, count)
        if log.dataset is not None:
            from envs.base.recorder import RecordedEnv

            env = RecordedEnv(env, Path(log.dataset), evaluations_only=log.dataset_episodes == "evaluations")
        return unreliable(paced(shaped(env, self._config.env.shaping), self._config.env.real_time))

    def is_ready(self) -> bool:
        """Whether the simulator is built."""
        return self._worker is not None

    def notes(self) -> list[str]:
        """Warnings since the last call."""
        return self._notes.take()

    def stats(self) -> dict[str, float]:
        worker = self._worker
        return worker.meter.snapshot() if worker else {}

    def pause(self) -> None:
        """End ``run``, and keep the simulator for another one."""
        self._keeps_env = True
        self.stop()

    def stop(self) -> None:
        if worker := self._worker:
            worker.stop()
