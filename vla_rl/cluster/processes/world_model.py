"""The process of the world model: it learns, and plays imagined episodes like an env worker."""

import queue
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from vla_rl.cluster.processes.common import PulseAddress, Traced, device_lease
from vla_rl.config.run_config import RunConfig
from vla_rl.core.ipc.mailbox import PoolAddress
from vla_rl.core.postponed import Writes, Written
from vla_rl.core.records import EnvSpec, Trajectory
from vla_rl.placement.plan import Plan, Process

_FOLDER = "world_model"  # in a checkpoint


class StoreSink:
    """The replay store as imagination sees it (``BundleSink``)."""

    def __init__(self, store: ActorHandle) -> None:
        self._store = store

    def add_imagined(self, episode_id: int, imagined: Sequence[Trajectory], passed: bool) -> None:
        self._store.add_imagined.remote(episode_id, imagined, passed)


class WorldModelProcess(Traced):
    """Real episodes come by ``observe``, imagined ones go to the store."""

    def __init__(self, config: RunConfig, spec: EnvSpec, process: Process, lock_server: Path) -> None:
        self._config, self._spec, self._process, self._lock_server = config, spec, process, lock_server
        self.record_spans(process, config.log.trace)
        self._inbox = queue.SimpleQueue[Trajectory | None]()  # None: the end
        self._failure: Exception | None = None  # of the thread that observes
        self._imagination: Any = None
        self._trainer: Any = None
        self._worker: Any = None

    def setup(self, store: ActorHandle, checkpoint: Path | None) -> None:
        """Build encoder and model; continue from a checkpoint of the run if given."""
        from vla_rl.core.devices.settings import set_up_torch
        from vla_rl.policies.build import build_policy, torch_dtype
        from vla_rl.world_model.encoder import FrozenEncoder
        from vla_rl.world_model.files import load_world_model
        from vla_rl.world_model.imagination import make_imagination
        from vla_rl.world_model.trainer import ModelTrainer

        config, device = self._config, self._process.torch_device
        assert config.world_model is not None
        lease = device_lease(self._process, self._lock_server, self.spans)
        set_up_torch(device, self._process.threads, config.learner.matmul)
        prompts = config.algo.prompts(self._spec.instructions)
        dtype = torch_dtype(config.learner.precision)
        policy = build_policy(config.policy, self._spec, config.seed, prompts, device=device, dtype=dtype)
        encoder = FrozenEncoder(
            policy,
            config.policy.spec(self._spec),
            config.policy.temperature_at(0),
            device,
            lease,
        )
        discount = config.algo.chunk_discount(config.policy.chunk_size)
        self._trainer = ModelTrainer(config.world_model, config.seed, discount)
        self._imagination = make_imagination(
            config.world_model,
            encoder,
            self._trainer,
            StoreSink(store),
            discount=discount,
            seed=config.seed,
            device=device,
            lease=lease,
        )
        if checkpoint is not None:
            load_world_model(checkpoint / _FOLDER, self._trainer, self._imagination)
        for part in self._timed():
            part.meter.spans = self.spans
        threading.Thread(target=self._observe_all, name="observe", daemon=True).start()

    def run(self, address: PoolAddress, position: int, plan: Plan, pulse: PulseAddress) -> None:
        """Imagine until ``stop``. ``position``: of the row of environments among those of the inference server.

        Raises what went wrong with a real episode.
        """
        from vla_rl.core.ipc.mailbox import WorkerMailbox
        from vla_rl.rollout.env_worker import EnvWorker
        from vla_rl.world_model.imagined_env import ImaginedEnv

        config = self._config
        assert config.world_model is not None
        envs = plan.envs_per_worker
        self._worker = EnvWorker(
            worker=-1,
            env=ImaginedEnv(self._spec, envs, self._imagination, config.world_model.disagreement),
            mailbox=WorkerMailbox(address, position),
            assignments=self._imagination,
            policy=config.policy.spec(self._spec),
            splits=envs,
            bootstrap_rule="never",
            keeps_state=config.algo.reads_state,
        )
        progress = pulse.open(self._process)
        self._worker.meter.observer, self._worker.meter.spans = progress, self.spans
        try:
            if self._failure is None:
                self._worker.run()
        finally:
            progress.rest()
        if self._failure is not None:
            raise self._failure

    def observe(self, trajectory: Trajectory) -> None:
        """A real episode has ended. Returns at once."""
        self._inbox.put(trajectory)

    # consumes: real episodes. waits for: the inbox. unblocked by: an episode, stop().
    def _observe_all(self) -> None:
        try:
            while (trajectory := self._inbox.get()) is not None:
                self._imagination.observe(trajectory)
        except Exception as error:  # run() raises it
            self._failure = error
            self.stop()

    def write(self, folder: Path) -> Written:
        """Write model, archive and audit into a checkpoint."""
        from vla_rl.world_model.files import save_world_model

        writes, part = Writes(), folder / _FOLDER
        writes.add(part, partial(save_world_model, part, self._trainer, self._imagination))
        return writes.run(folder)

    def metrics(self) -> dict[str, float]:
        return self._imagination.metrics() if self._imagination else {}

    def stats(self) -> dict[str, float]:
        if self._worker is None:
            return {}
        parts = [self._worker, *self._timed()]
        return {name: total for part in parts for name, total in part.meter.snapshot().items()}

    def _timed(self) -> list[Any]:
        """What has a meter, apart from the worker."""
        futures = self._imagination.futures
        return [self._trainer, self._imagination, *([] if futures is None else [futures.frames])]

    def stop(self) -> None:
        self._inbox.put(None)
        if self._imagination:
            self._imagination.stop()
        if self._worker:
            self._worker.stop()
