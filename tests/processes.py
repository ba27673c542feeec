"""Questions to processes that may end meanwhile: Ray starts and ends some of its own at any time."""

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

T = TypeVar("T")


def answers(processes: Iterable[psutil.Process], ask: Callable[[psutil.Process], T]) -> list[T]:
    """What ``ask`` gives for each of them that has not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(ask(process))
    return found


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """Addresses of this machine at which they wait for connections."""
    sockets = answers(processes, lambda process: process.net_connections("inet"))
    return {c.laddr.ip.removeprefix("::ffff:") for each in sockets for c in each if c.status == psutil.CONN_LISTEN}
