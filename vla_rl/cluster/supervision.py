"""Which of a run's simulator and inference processes make no progress, on all nodes."""

import contextlib
import time

from ray.exceptions import RayError

from vla_rl.cluster.processes.common import PulseAddress
from vla_rl.cluster.ray_session import RaySession
from vla_rl.placement.plan import Plan, Process

_LOOK_EVERY_S = 1.0


class Supervision:
    """Kills the processes that are overdue; whoever waits for them then sees them die."""

    def __init__(self, session: RaySession, plan: Plan, stall_s: float, setup_s: float) -> None:
        """``stall_s``: ``placement.stall_timeout_s``; ``setup_s``: for building a simulator, and for first calls."""
        self._session, self._plan = session, plan
        self._stall_s, self._setup_s = stall_s, setup_s
        self._looked = 0.0
        self._killed: dict[tuple[str, int], float] = {}  # seconds without progress
        # of all nodes alike: rows of workers, then of servers
        self._watched = [*plan.workers, *plan.servers]
        self._paths = {
            node: session.call(node, "create_pulses", len(self._watched)) for node in {p.node for p in self._watched}
        }

    def address(self, process: Process) -> PulseAddress:
        """Where the process shows its progress."""
        return PulseAddress(self._paths[process.node], self._watched.index(process), self._stall_s, self._setup_s)

    def look(self) -> None:
        """Call often; looks at most once a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        for node in self._paths:
            with contextlib.suppress(RayError):  # a dead node's processes are found by their death
                for row, silent in self._session.call(node, "kill_overdue").items():
                    process = self._watched[row]
                    self._killed[process.role, process.index] = silent

    def reason(self, role: str, index: int) -> str | None:
        """Why the process was killed, if it was; once."""
        silent = self._killed.pop((role, index), None)
        return None if silent is None else f"killed after {silent:.0f} s without progress"
