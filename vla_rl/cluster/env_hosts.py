"""Hosts that only simulate: they may join and leave while a run goes on.

    a new node of the Ray cluster ──▶ a free place of the plan ──▶ its relay reaches the gateways ──▶ its workers play
    it is dead, or does not answer ──▶ its processes are forgotten, and their episodes lost ──▶ the place is free

A place is a node of the plan. The numbers, rows and seeds of its env workers stay, whichever host has it.
"""

import textwrap
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from vla_rl.cluster.calls import cause_of
from vla_rl.cluster.deadlines import Deadlines
from vla_rl.cluster.launcher import Launcher
from vla_rl.cluster.network import Network, Steps
from vla_rl.cluster.ray_session import RaySession, gpus_of, name_of, require_same_code
from vla_rl.cluster.supervision import Supervision
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.placement.plan import Plan, Process

_LOOK_EVERY_S = 1.0
_REASON = 160  # characters at most: Ray's own are long
_AGAIN_S = 60.0  # until a host that has left, though its node lives, is tried again


class Places:
    """Which host has which place of the plan."""

    def __init__(self, places: Sequence[int], least: int) -> None:
        """``least``: hosts without which the run waits."""
        self.hosts: dict[int, str] = {}  # by place
        self.playing = set[int]()  # places whose hosts are complete
        self.all, self.least = tuple(places), min(least, len(places))
        self._not_before: dict[str, float] = {}

    def gone(self, alive: Collection[str]) -> list[int]:
        """Places whose hosts are not ``alive``."""
        return [place for place, host in self.hosts.items() if host not in alive]

    def take(self, alive: Sequence[str], now: float) -> dict[int, str]:
        """Give free places to hosts that have none, in their order; returns these."""
        free = [place for place in self.all if place not in self.hosts]
        new = [h for h in alive if h not in self.hosts.values() and self._not_before.get(h, now) <= now]
        taken = dict(zip(free, new, strict=False))
        self.hosts |= taken
        return taken

    def leave(self, place: int, now: float) -> None:
        """The place is free. Its host, if it still lives, gets none for a while."""
        self.playing.discard(place)
        self._not_before[self.hosts.pop(place)] = now + _AGAIN_S

    @property
    def too_few(self) -> str:
        """Such as "1 of 2"; empty if enough hosts play."""
        return f"{len(self.playing)} of {self.least}" if len(self.playing) < self.least else ""


class Crew(Protocol):
    """Whoever keeps the processes of a run (``Cluster``)."""

    config: RunConfig
    spec: EnvSpec
    plan: Plan
    deadlines: Deadlines
    notify: Callable[[str], None]

    def arrive(self, workers: Sequence[Process], relay: Process) -> None:
        """Their host is ready: start the env workers. The relay is started by ``EnvHosts``."""

    def depart(self, workers: Sequence[Process], relay: Process) -> None:
        """They are gone with their host."""

    def keep(self, loop: ray.ObjectRef, process: Process) -> None:
        """``loop`` does not end while all is well."""


@dataclass(slots=True)
class _Doing:
    """What is being done at a place."""

    steps: Steps
    call: Any  # to wait for
    deadline: float


class EnvHosts:
    """Those of one start of a cluster."""

    def __init__(
        self, crew: Crew, session: RaySession, launch: Launcher, network: Network, supervision: Supervision
    ) -> None:
        self._crew, self._session, self._launch = crew, session, launch
        self._network, self._supervision = network, supervision
        plan, alone = crew.plan, crew.plan.remote == crew.plan.workers  # then somebody must play
        self.places = Places(plan.env_hosts, max(crew.config.placement.env_hosts.min, int(alone)))
        self._relays = {relay.node: relay for relay in plan.request_relays}
        self._workers = {place: [w for w in plan.workers if w.node == place] for place in plan.env_hosts}
        self._names: dict[int, str] = {}
        self._doing: dict[int, _Doing] = {}
        self._looked = 0.0

    @property
    def wanted(self) -> str:
        """What the run waits for, and how it comes; empty if enough hosts play."""
        if not (few := self.places.too_few):
            return ""
        return f"{few} (placement.env_hosts.min); join one with `vla-rl join {self._session.address}`"

    def look(self) -> None:
        """Go on with what is being done; once a second, see which hosts have come and gone. Waits for nothing."""
        for place in list(self._doing):
            self._go_on(place)
        for place, why in self._supervision.take_lost().items():
            self.leave(place, why)
        now = time.monotonic()
        if not self.places.all or now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        alive = self._session.others_alive()
        for place in self.places.gone(alive):
            self.leave(place, "Ray has lost its node")
        simulate_best = sorted(alive, key=lambda host: (gpus_of(alive[host]), host))
        for place, host in self.places.take(simulate_best, now).items():
            self._names[place] = name_of(alive[host])
            self._do(place, self._join(place, host))

    def renew(self, relay: Process) -> None:
        """Start a new relay in place of one that has ended."""
        if relay.node in self.places.playing:
            self._do(relay.node, self._start_relay(relay))

    def leave(self, place: int, why: str) -> None:
        """Forget the host at ``place`` and all that runs there."""
        if place not in self.places.hosts:
            return
        self._doing.pop(place, None)
        self.places.leave(place, time.monotonic())
        relay = self._relays[place]
        self._supervision.watch(place, None)
        self._crew.depart(self._workers[place], relay)
        self._network.leave(relay)
        self._session.leave(place)
        reason = textwrap.shorten(why.splitlines()[0] if why else "unknown", _REASON, placeholder=" ...")
        self._crew.notify(f"env host {self._names[place]} has left, {len(self.places.playing)} play: {reason}")

    def _join(self, place: int, host: str) -> Steps:
        node = self._session.join(place, host, self._names[place])
        require_same_code(*(yield node.get_code.remote()))
        self._session.use(place, (yield node.begin.remote()))
        pools, spec = list(self._launch.guest_pools(place).values()), self._crew.spec
        yield node.create_pools.remote(pools, spec, self._crew.config.policy.spec(spec))
        self._supervision.watch(place, (yield node.create_pulses.remote(self._supervision.rows)))
        workers, relay = self._workers[place], self._relays[place]
        self._crew.arrive(workers, relay)  # first: simulators take longest to start
        yield from self._start_relay(relay)
        self.places.playing.add(place)
        joined = f"has joined with {len(workers)} env workers; {len(self.places.playing)} play"
        self._crew.notify(f"env host {self._names[place]} {joined}")

    def _start_relay(self, relay: Process) -> Steps:
        return self._network.start_relay(relay, self._supervision.address(relay), self._crew.keep)

    def _do(self, place: int, steps: Steps) -> None:
        self._doing[place] = _Doing(steps, next(steps), time.monotonic() + self._crew.deadlines.setup)

    def _go_on(self, place: int) -> None:
        """Take the next step at a place if the last one has ended."""
        doing, now, limit = self._doing[place], time.monotonic(), self._crew.deadlines.setup
        if not ray.wait([doing.call], timeout=0.0)[0]:
            if now > doing.deadline:
                self.leave(place, f"it has not started within {limit:.0f} s")
            return
        try:
            doing.call, doing.deadline = doing.steps.send(ray.get(doing.call)), now + limit
        except StopIteration:
            del self._doing[place]
        except (RayError, UserError) as error:
            reason = cause_of(error) if isinstance(error, RayError) else str(error)
            self.leave(place, f"{reason}; it is tried again in {_AGAIN_S:.0f} s")
