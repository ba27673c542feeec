"""A served policy in a thread of the test, and clients of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime_fakes import POLICY, SPEC, EchoPolicy
from vla_rl.core.records import ActionBatch, EnvSpec, Observation, PolicySpec
from vla_rl.inference.inference_server import BatchPolicy, BatchRule
from vla_rl.inference.serving.batched_policy import BatchedPolicy
from vla_rl.inference.serving.server import Door, serve_policy


class Dimmed(EchoPolicy):
    """Every number of an action is the first pixel's share of 255: within all limits, and the row's own."""

    def act(self, observation: Observation, draws: Mapping[str, np.ndarray], greedy: np.ndarray) -> ActionBatch:
        found = super().act(observation, draws, greedy)
        return ActionBatch(found.actions / np.float32(255), found.record, found.logprobs, found.values, 0)


class Served:
    """Where it is, and how it ended."""

    port: int
    error: BaseException | None = None

    @property
    def address(self) -> str:
        return f"ws://127.0.0.1:{self.port}"


@contextmanager
def served(
    folder: Path,
    policy: BatchPolicy,
    spec: EnvSpec = SPEC,
    policy_spec: PolicySpec = POLICY,
    *,
    token: str | None = None,
    seats: int = 8,
    max_wait_s: float = 0.002,
) -> Iterator[Served]:
    """Ends with the block, within seconds."""
    here, ready = Served(), threading.Event()
    stop: Any = None

    def listening(port: int) -> None:
        here.port = port
        ready.set()

    async def serve() -> None:
        nonlocal stop
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        stop = lambda: loop.call_soon_threadsafe(stopped.set)  # noqa: E731
        batched = BatchedPolicy(policy, spec, policy_spec, BatchRule(seats, max_wait_s), seats, folder)
        await serve_policy(batched, Door("127.0.0.1", 0, token), stopped, listening)

    def run() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            here.error = error
        ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield here
    finally:
        if thread.is_alive():
            stop()
        thread.join(10)
        assert not thread.is_alive(), "it ends within seconds, whoever is connected"


def request(mark: int = 0, task: int = 0, spec: EnvSpec = SPEC) -> dict[str, Any]:
    """Of openpi's client."""
    size = spec.image_size
    return {
        "observation/image": np.full((size, size, 3), mark, np.uint8),
        "observation/state": np.zeros(spec.proprio_dim),
        "prompt": spec.instructions[task],
    }
