"""`vla-rl benchmark network CONFIG`: what the way over the network adds to a request for an action chunk.

    worker ─ rows ─ relay ─ loopback interface ─ gateway ─ rows ─ server whose policy takes no time

The simulator of the config gives the observations. Everything runs in one process, whose processor time is that of the
whole way, encryption included. Shared memory and the network, with and without compression, take turns. What a link
adds is computed from the bytes: these divided by its rate.
"""

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from envs import make_env
from vla_rl.commands.metadata import git_commit, machine_record, package_versions
from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import write_json
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, create_pool
from vla_rl.core.records import ActionBatch, Array, EnvSpec, EpisodeSpec, Observation, PolicySpec
from vla_rl.inference.inference_server import BatchRule, InferenceServer
from vla_rl.inference.network.gateway import Gateway
from vla_rl.inference.network.relay import Relay
from vla_rl.inference.network.sockets import Keys
from vla_rl.observability.console import make_console
from vla_rl.observability.meter import Meter
from vla_rl.placement.checks import load_checked_config

_FRAMES = 16  # observations, a chunk of random actions apart
_BLOCK = 50  # requests of each way in a turn
_MBITS = (100, 1000, 10_000)
_NODE, _WAIT_S, _SILENT_S = 1, 10.0, 60.0
WAYS: dict[str, bool | None] = {
    "shared memory": None,
    "network": False,
    "network, compressed": True,
}  # None: no network; whether to compress


@dataclass(slots=True)
class Way:
    """What requests of one way took, in medians over blocks."""

    round_trips: list[float] = field(default_factory=list)  # ms, the median of each block
    processor: list[float] = field(default_factory=list)  # ms for each request
    nbytes: float = 0.0  # both directions together, for each request

    def at(self, mbits: float) -> float:
        """Milliseconds of a request where the link has this rate."""
        return median(self.round_trips) + self.nbytes * 8 / (mbits * 1e3)


class _InstantPolicy:
    """Answers with zeros."""

    def __init__(self, spec: PolicySpec) -> None:
        self.meter, self._spec = Meter(), spec

    def refresh(self) -> int:
        return 0

    def act(self, observation: Observation, draws: Mapping[str, Array], greedy: Array) -> ActionBatch:
        n, shape = len(greedy), (self._spec.chunk_size, self._spec.action_dim)
        record = {name: np.zeros((n, *one.shape), one.dtype) for name, one in self._spec.record.items()}
        zeros = np.zeros((n, *shape), np.float32)
        return ActionBatch(zeros, record, zeros, np.zeros(n, np.float32), 0)

    def offload(self) -> None: ...

    def onload(self) -> None: ...


def network_command(args: Any) -> int:
    """Measure, print and write."""
    config = load_checked_config(args.config, args.overrides)
    spec, seen = _observations(config)
    ways = measure(seen, spec, config.policy.spec(spec), args.blocks)
    make_console().print(_table(ways, spec))
    if args.json:
        about: dict[str, Any] = {"machine": machine_record(), "packages": package_versions()}
        about |= {"git_commit": git_commit()}
        about |= {"config": config.model_dump(mode="json"), "blocks": args.blocks, "requests": _BLOCK}
        links = {name: {str(mbits): way.at(mbits) for mbits in _MBITS} for name, way in ways.items()}
        write_json(args.json, about | {"ways": {n: asdict(w) for n, w in ways.items()}, "ms_by_mbits": links})
    return 0


def _observations(config: RunConfig) -> tuple[EnvSpec, list[Observation]]:
    """What an environment of the config shows while it executes random actions."""
    env, rng = make_env(config.env, 1), np.random.default_rng(0)
    try:
        spec: EnvSpec = env.spec
        seen: list[Observation] = []
        chunk = (1, config.policy.chunk_size, spec.action_dim)
        env.reset([0], [EpisodeSpec(0, 0, 0, 0)])
        for _ in range(_FRAMES):
            size = (1, len(spec.views), spec.image_size, spec.image_size, 3)
            shown = Observation(
                np.zeros(size, np.uint8),
                np.zeros((1, spec.proprio_dim), np.float32),
                np.zeros(1, np.int32),
                np.zeros(1, np.float32),
            )
            env.observe([0], shown)
            seen.append(shown)
            result = env.step([0], rng.uniform(spec.actions.low, spec.actions.high, chunk).astype(np.float32))
            if (result.terminated | result.truncated)[0]:
                env.reset([0], [EpisodeSpec(0, 0, 0, 0)])
        return spec, seen
    finally:
        env.close()


def measure(seen: list[Observation], spec: EnvSpec, policy: PolicySpec, blocks: int) -> dict[str, Way]:
    """Requests with these observations, in turns of every way."""
    ways = {name: Way() for name in WAYS}
    with ExitStack() as stack:
        lines = {name: stack.enter_context(_line(spec, policy, compress)) for name, compress in WAYS.items()}
        for line in lines.values():
            _ask(*line, seen, policy, Way())  # connections are made
        for _ in range(blocks):
            for name, line in lines.items():
                _ask(*line, seen, policy, ways[name])
    return ways


def _ask(mailbox: WorkerMailbox, meter: Meter, seen: list[Observation], policy: PolicySpec, way: Way) -> None:
    """One block of requests, each after the answer to the one before."""
    draws = {name: numbers.draw(np.random.default_rng(0))[None] for name, numbers in policy.draws.items()}
    took: list[float] = []
    before, cpu = meter.snapshot(), time.process_time()
    for number in range(_BLOCK):
        for f in fields(Observation):
            getattr(mailbox.observation, f.name)[0] = getattr(seen[number % len(seen)], f.name)[0]
        start = time.perf_counter()
        mailbox.request([0], draws, np.zeros(1, bool))
        if not mailbox.wait(_WAIT_S):
            raise TimeoutError(f"no answer for {_WAIT_S:.0f} s")
        took.append(1e3 * (time.perf_counter() - start))
    way.round_trips.append(median(took))
    way.processor.append(1e3 * (time.process_time() - cpu) / _BLOCK)
    sent = meter.snapshot().get("network_bytes", 0.0) - before.get("network_bytes", 0.0)
    way.nbytes = sent / _BLOCK


@contextmanager
def _line(spec: EnvSpec, policy: PolicySpec, compress: bool | None) -> Iterator[tuple[WorkerMailbox, Meter]]:
    """A worker's mailbox and the relay's meter, with all that is behind them. ``compress`` None: no network."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = PoolAddress(folder, "home", 1, 1, () if compress is None else (range(1),))
        create_pool(home, spec, policy)
        server = InferenceServer(_InstantPolicy(policy), ServerMailbox(home), BatchRule(1, 0.0))
        stack.enter_context(_running(server))
        if compress is None:
            yield WorkerMailbox(home, 0), Meter()
            return
        away, (of_gateway, of_relay) = PoolAddress(folder, "away", 1, 1), Keys.pair()
        create_pool(away, spec, policy)
        gateway = Gateway(WorkerMailbox(home, 0), {_NODE: 1}, 1, len(spec.instructions), "127.0.0.1", of_gateway)
        stack.callback(gateway.close)
        relay = Relay({0: ServerMailbox(away)}, 1, _NODE, of_relay, compress)
        relay.connect(0, gateway.endpoint)
        stack.enter_context(_running(gateway))
        stack.enter_context(_running(relay, _SILENT_S))
        yield WorkerMailbox(away, 0), relay.meter


@contextmanager
def _running(loop: Any, *args: float) -> Iterator[None]:
    thread = threading.Thread(target=loop.run, args=args)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join()


def _table(ways: Mapping[str, Way], spec: EnvSpec) -> Table:
    views = f"{len(spec.views)} x {spec.image_size} pixels"
    table = Table(title=f"one request of {spec.name}, {views}: milliseconds")
    for name in ("way", "round trip", "processor", "KiB", *(f"at {mbits:,} Mbit/s" for mbits in _MBITS)):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, way in ways.items():
        links = [f"{way.at(mbits):.2f}" if way.nbytes else "" for mbits in _MBITS]
        spent = f"{median(way.processor):.2f}"
        table.add_row(name, f"{median(way.round_trips):.2f}", spent, f"{way.nbytes / 1024:.0f}", *links)
    return table
