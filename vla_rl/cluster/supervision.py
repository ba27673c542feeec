"""Which of a run's processes make no progress, on all nodes, and how often one is replaced."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

from ray.exceptions import RayError, RayTaskError

from vla_rl.cluster.calls import ProcessDied, ProcessFailed, describe
from vla_rl.cluster.processes.common import PulseAddress
from vla_rl.cluster.ray_session import RaySession
from vla_rl.placement.plan import STORE, Plan, Process

_LOOK_EVERY_S = 1.0
_WINDOW_S = 600.0
_DEATHS_EACH = 5  # of each process on average, within the window
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before a process is replaced that died soon after its start
_HEALTHY_S = 60.0  # a process that lived for so long did its work: its next replacement is not held back
_ERRORS_EACH = 2  # of one process: what raises the same error at each start comes back at once
_DEATHS_IN_VAIN = 5  # of each process of a role, without progress of the run in between


class RestartRate:
    """How often processes are replaced. A run of weeks may replace many; what fails at each start must end it."""

    def __init__(self, most: int, window_s: float = _WINDOW_S) -> None:
        """``most``: replacements within ``window_s`` seconds."""
        self.most, self.window_s = most, window_s
        self._times: deque[float] = deque()

    @property
    def recent(self) -> int:
        """How many were counted within the window."""
        return len(self._times)

    def count(self, now: float) -> bool:
        """Count one at the time ``now``, in seconds; whether they are too many."""
        self._times.append(now)
        while self._times[0] < now - self.window_s:
            self._times.popleft()
        return len(self._times) > self.most


class Replacements:
    """Env workers and inference servers that were replaced; too many end the run, with the first cause."""

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: role and index of each process, as in "env worker 0"."""
        self.count = 0
        self.absent = set[str]()  # those of places that no env host has
        self._names = tuple(names)
        self._in_vain: Counter[str] = Counter()  # deaths of each process since ``progressed``
        self._deaths = RestartRate(_DEATHS_EACH * len(names))
        self._errors: defaultdict[str, RestartRate] = defaultdict(lambda: RestartRate(_ERRORS_EACH))
        self._first: dict[str, str] = {}  # error of each process
        self._pauses: dict[str, float] = {}  # before the last replacement of each process, in seconds
        self._started: dict[str, float] = {}  # when that was

    def progressed(self) -> None:
        """To be called when episodes have come in: the processes do their work, at least between deaths."""
        self._in_vain.clear()

    def admit(self, name: str, failure: RayError | None) -> str:
        """Why the process is replaced, in one line.

        Raises ProcessFailed or ProcessDied if that has happened too often.
        """
        reason = "it returned" if failure is None else describe(failure)
        self.count += 1
        self._in_vain[name] += 1
        now = time.monotonic()
        if isinstance(failure, RayTaskError):
            too_many = self._errors[name].count(now)
            if self._errors[name].recent == 1:
                self._first[name] = reason
            if too_many:
                times = f"{_ERRORS_EACH + 1} times within {_WINDOW_S:.0f} s"
                raise ProcessFailed(f"{name} failed {times}: {self._first[name]}")
        role = name.rpartition(" ")[0]
        peers = [n for n in self._names if n.rpartition(" ")[0] == role and n not in self.absent]
        if all(self._in_vain[n] >= _DEATHS_IN_VAIN for n in peers):
            raise ProcessFailed(
                f"{name} died {self._in_vain[name]} times without getting anywhere, as did every other {role}: {reason}"
            )
        if self._deaths.count(now):
            others = f"{self._deaths.most} others within {self._deaths.window_s:.0f} s before"
            raise ProcessDied(f"{name} died ({reason}), and {others}")
        return reason.splitlines()[0]

    def pause(self, name: str, now: float) -> float:
        """Seconds to wait from ``now`` on before a process that was admitted is started again.

        None at first; then 1, 2, 4, ..., 60, as long as it dies within a minute of its start.
        """
        lived = now - self._started.get(name, -float("inf"))
        before = self._pauses.get(name, 0.0)
        pause = 0.0 if lived > _HEALTHY_S else min(_LONGEST_PAUSE_S, 2 * before or _FIRST_PAUSE_S)
        self._pauses[name], self._started[name] = pause, now + pause
        return pause


class Supervision:
    """Kills the processes that are overdue; whoever waits for them then sees them die."""

    def __init__(self, session: RaySession, plan: Plan, stall_s: float, setup_s: float) -> None:
        """``stall_s``: ``placement.stall_timeout_s``; ``setup_s``: for building a simulator, and for first calls."""
        self._session, self._plan = session, plan
        self._stall_s, self._setup_s = stall_s, setup_s
        self._looked = 0.0
        self._watched = [*plan.processes, *plan.relays, *plan.links, STORE]  # the rows of all nodes
        self._env_hosts = plan.env_hosts
        self._lost: dict[int, str] = {}
        self._paths = {
            node: session.call(node, "create_pulses", self.rows)
            for node in {p.node for p in self._watched} - set(plan.env_hosts)
        }

    @property
    def rows(self) -> int:
        """How many a node must have (``Node.create_pulses``)."""
        return len(self._watched)

    def watch(self, node: int, path: Path | None) -> None:
        """From now on, look after the place of an env host, which has its rows there; None: no longer."""
        self._paths.pop(node, None)
        if path is not None:
            self._paths[node] = path

    def take_lost(self) -> dict[int, str]:
        """Env hosts that were found not to answer any more, and why."""
        lost, self._lost = self._lost, {}
        return lost

    def address(self, process: Process) -> PulseAddress:
        """Where the process shows its progress."""
        return PulseAddress(self._paths[process.node], self._watched.index(process), self._stall_s, self._setup_s)

    def look(self) -> list[str]:
        """What was killed just now. Call often; looks at most once a second, and waits for no other node.

        Raises ProcessDied if a node with other processes is lost, or Ray's own processes are.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return []
        self._looked = now
        self._session.require_ray()
        killed = []
        for node in sorted(self._paths):  # this one first, whatever becomes of the others
            try:
                overdue = self._session.ask(node, "kill_overdue") or {}
            except ProcessDied as error:
                if node not in self._env_hosts:
                    raise
                self._lost[node] = str(error)
                continue
            for row, silent in overdue.items():
                process = self._watched[row]
                killed.append(f"{process.role} {process.index} made no progress for {silent:.0f} s: killed")
        return killed
