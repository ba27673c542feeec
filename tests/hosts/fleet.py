"""Hosts of a run whose simulators are apart: the head has driver, learner and inference, the others only simulate."""

import contextlib
import subprocess
from typing import Any

from tests.hosts.network import Host, Network
from tests.hosts.ray_hosts import start_ray, trust

_DISK = "400m"  # of a host that simulates


class Fleet:
    """The hosts of a run, and who operates them."""

    def __init__(self, network: Network, others: int) -> None:
        self._network, self._number = network, 0
        self.head = network.host("head")
        self.address = start_ray(self.head)
        self.others = [self._join() for _ in range(others)]
        self.gone = 0  # of them

    @property
    def last(self) -> Host:
        """To which harm comes."""
        return self.others[-1]

    def lose(self) -> None:
        """The power of one fails."""
        self.last.kill()
        self.gone = 1

    def take_away(self) -> None:
        """One is told to go, as a preempted machine is."""
        self.last.run("pkill", "-TERM", "-f", "vla-rl join")
        self.gone = 1

    def cut_off(self) -> None:
        """Nothing reaches one, and nobody is told."""
        self.last.cut_off()
        self.gone = 1

    def reconnect(self) -> None:
        """The end of ``cut_off``."""
        self.last.join()
        self.gone = 0

    def replace(self, **environment: str) -> None:
        """There is another host in place of the last one."""
        self.last.kill()
        self.others[-1] = self._join(**environment)
        self.gone = 0

    def shape(self, **shape: float) -> None:
        """The cables of all but the head are so from now on."""
        for host in self.others:
            host.shape(**shape)

    def fill_disk(self) -> None:
        """Until nothing more fits."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.last.run("sh", "-c", "cat /dev/zero > /tmp/filler")

    def empty_disk(self) -> None:
        """The end of ``fill_disk``."""
        self.last.path("/tmp/filler").unlink()

    def _join(self, **environment: str) -> Host:
        self._number += 1
        host = self._network.host(f"host{self._number}", disk=_DISK)
        trust(self.head, host)
        host.environment |= environment
        silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        host.start("vla-rl", "join", self.address, "--node-ip-address", host.address, **silent)
        return host
