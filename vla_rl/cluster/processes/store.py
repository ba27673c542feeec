"""The process of the replay store."""

from functools import partial
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from vla_rl.cluster.processes.common import PulseAddress, Traced, Vital
from vla_rl.core.postponed import Writes, Written
from vla_rl.core.records import EpisodeResult, Trajectory
from vla_rl.placement.plan import STORE
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.store import ReplayStore
from vla_rl.replay.trajectory_file import save_trajectories


class StoreProcess(Traced, Vital, ReplayStore):
    """Closed until ``open``: env workers start with everything else, and wait until the run's state is restored."""

    def __init__(self, rules: StoreRules, traced: bool = False) -> None:
        super().__init__(rules, is_open=False)
        self.record_spans(STORE, traced)
        self.meter.spans = self.spans
        self._world_model: ActorHandle | None = None
        self._writes = Writes()

    def beat(self, pulse: PulseAddress) -> None:
        """Show that this process is not frozen."""
        pulse.open(STORE).beat(self.counters)

    def attach_world_model(self, process: ActorHandle) -> None:
        """Pass all real training episodes on to it."""
        self._world_model = process

    def add(self, worker: int, finished: Trajectory | EpisodeResult) -> bool:
        accepted = super().add(worker, finished)
        if accepted and self._world_model is not None and isinstance(finished, Trajectory):
            self._world_model.observe.remote(finished)
        return accepted

    def snapshot(self, folder: Path) -> dict[str, Any]:
        """Note the finished but untrained trajectories, which ``write`` will write; returns the counters."""
        record, trajectories = self.state()
        path = folder / "trajectories.npz"
        self._writes.add(path, partial(save_trajectories, path, trajectories))
        return record

    def write(self, folder: Path) -> Written:
        return self._writes.run(folder)
