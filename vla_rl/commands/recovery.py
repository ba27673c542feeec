"""How a run goes on after it has lost a learner or a node, or after something took too long.

    failure ──▶ processes are ended ──▶ newest undamaged checkpoint ──▶ new processes

Env workers, inference servers and the store are replaced without that (``vla_rl.cluster``). What keeps coming ends the
run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vla_rl.cluster.calls import ProcessFailed
from vla_rl.cluster.supervision import RestartRate
from vla_rl.commands.checkpoints import read_state
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RecoverableError, RunError, UserError
from vla_rl.core.records import Trajectory
from vla_rl.placement.plan import Plan
from vla_rl.placement.planner import plan_of_record
from vla_rl.replay.trajectory_file import load_trajectories

_WINDOW_S = 3600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 120.0  # before a restart that follows another one without an update in between


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run, or its part up to a migration or a failure, starts from."""

    checkpoint: Path | None = None
    state: dict[str, Any] = field(default_factory=lambda: {"policy_version": 0, "seconds": 0.0})
    trajectories: list[Trajectory] = field(default_factory=list)
    plan: Plan | None = None  # None: the one for a new run

    @classmethod
    def of(cls, checkpoint: Path, config: RunConfig) -> Self:
        """Raises UserError if the checkpoint is damaged."""
        state = read_state(checkpoint)
        plan = plan_of_record(config, state["layout"]) if config.placement.replan_every and "layout" in state else None
        return cls(checkpoint, state, load_trajectories(checkpoint / "trajectories.npz"), plan)


class Recovery:
    """Whether a run is restarted, and from where."""

    def __init__(self, config: RunConfig, folder: RunFolder, seconds: float, say: Callable[[str], None]) -> None:
        """``seconds``: training time before this session. ``say``: called with what happens."""
        self._config, self._folder, self._say = config, folder, say
        self._began = time.monotonic() - seconds
        self._rate = RestartRate(config.train.restarts, _WINDOW_S)
        self._updates = 0  # that had been done in this session at the last failure
        self._in_a_row = 0  # restarts without an update in between
        self._first = ""  # cause among these
        self.restarts = 0

    def start_after(self, error: Exception) -> Start:
        """Where to start again after ``error``; the folder is as it was then.

        Raises ``error``, or a RunError that begins with the first cause, if the run cannot go on.
        """
        while True:
            self._admit(error)
            try:
                return self._go_back()
            except (UserError, OSError) as again:
                error = again

    def _admit(self, error: Exception) -> None:
        updates, self._updates = self._folder.updates - self._updates, self._folder.updates
        if updates:
            self._in_a_row, self._first = 0, ""
        if not (self._config.train.restarts and self._may_pass(error)):
            raise error
        self._first = self._first or str(error)
        if self._rate.count(time.monotonic()):
            last = "" if self._first == str(error) else f"\n\nThe last failure: {error}"
            raise RunError(
                f"{self._first}\n\nThe run was restarted {self._rate.most} times within an hour before that "
                f"(train.restarts).{last}"
            ) from error
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        self._say(f"the run is restarted from its newest checkpoint: {cause}")
        if self._in_a_row:
            time.sleep(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 4 ** (self._in_a_row - 1)))
        self._in_a_row += 1
        self.restarts += 1

    def _may_pass(self, error: Exception) -> bool:
        """Whether it can be better next time. What is wrong from the beginning, the user has to correct."""
        worked = self._folder.updates > 0  # in this session
        if isinstance(error, RecoverableError):
            return worked or not isinstance(error, ProcessFailed)
        return worked and isinstance(error, (UserError, OSError))

    def _go_back(self) -> Start:
        seconds = time.monotonic() - self._began
        checkpoint = self._folder.go_back(self._say)
        start = Start() if checkpoint is None else Start.of(checkpoint, self._config)
        start.state["seconds"] = seconds
        return start
