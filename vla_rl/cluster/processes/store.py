"""The process of the replay store."""

from pathlib import Path
from typing import Any

from vla_rl.replay.store import ReplayStore, StoreRules
from vla_rl.replay.trajectory_file import save_trajectories


class StoreProcess(ReplayStore):
    """Closed until ``open``: env workers start with everything else, and wait until the run's state is restored."""

    def __init__(self, rules: StoreRules) -> None:
        super().__init__(rules, is_open=False)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the finished but untrained trajectories; returns the counters."""
        record, trajectories = self.state()
        save_trajectories(folder / "trajectories.npz", trajectories)
        return record
