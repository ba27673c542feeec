"""Hosts out of Linux namespaces, on one machine: a host has its own network, name, processes, shared memory and disk.

::

    switch (a bridge in a namespace of its own) ──veth── host "a" 10.77.0.1
                                                ──veth── host "b" 10.77.0.2

A host sees the machine's files, but can write only to its own ``/tmp`` and ``/dev/shm``, so hosts exchange nothing by a
disk. Its monotonic clock is its own. As on many real machines, its own name means 127.0.1.1, other hosts' names mean
nothing, and there is a second network, whose address is the same on all hosts. There is no default route.

No namespace has a name outside of the processes in it, and these end with the process that made them, however it ends:
nothing can be left, and users at the same time do not meet.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests import ROOT

_WIRE = Path(__file__).with_name("wire.py")
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
_SPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--time")
_UPTIME_S = 100_000  # by which the uptime of a host differs from that of the one before
_READY_S = 20.0

# what the first process of a host does. Children that nobody waits for are buried by the kernel, since SIGCHLD is
# ignored. The code may lie below /tmp: "." still leads there when /tmp has become another one.
_SET_UP = """
set -e
cd "$CODE"
ip link set lo up
hostname "$NAME"
mount -o remount,bind,ro /
mount -t tmpfs -o size=$SHARED none /dev/shm
mount -t tmpfs -o size=$DISK none /tmp
mkdir -p "$CODE" /tmp/home
[ -e "$CODE/setup.py" ] || mount --no-canonicalize -o bind,ro . "$CODE"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$NAME" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
ip link add docker0 type bridge
ip address add 172.17.0.1/16 dev docker0
ip link set docker0 up
trap '' CHLD
echo ready
exec sleep infinity
"""


def obstacle() -> str | None:
    """Why no hosts can be made here; None: they can."""
    if lacking := [f"{tool} ({package})" for tool, package in _TOOLS.items() if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces with links between them"
    try:
        with Network() as network:
            network.host("probe")
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return f"the kernel refuses namespaces: {getattr(error, 'stderr', None) or error}"
    return None


def shape_of(link: str) -> dict[str, float]:
    """Arguments of ``Host.shape``: "10" is a round trip of 10 ms, "100mbit" a rate. Raises ValueError."""
    if link.endswith("mbit"):
        return {"mbit": float(link.removesuffix("mbit"))}
    return {"round_trip_ms": float(link)} if float(link) else {}


class _Space:
    """Namespaces of their own, and the process that keeps them."""

    def __init__(
        self, name: str, spaces: Sequence[str], script: str, environment: Mapping[str, str], uptime_s: int = 0
    ) -> None:
        self.name, self._spaces = name, spaces
        # setpriv: unshare ends with this process; --kill-child: what it has forked, and with it all of the host
        bound = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child"]
        if "--pid" in spaces:
            bound.append("--mount-proc")
        if uptime_s:
            bound += [f"--monotonic={uptime_s}", f"--boottime={uptime_s}"]
        self._keeper = subprocess.Popen(
            [*bound, "sh", "-c", script],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._keeper.stdout is not None
        said = ""
        while not said.endswith("ready\n"):
            if not (line := self._keeper.stdout.readline()):
                raise RuntimeError(f"{name} did not start: {said.strip()}")
            said += line
        (self.pid,) = map(int, Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split())

    def enter(self, *spaces: str) -> list[str]:
        """The beginning of a command line that runs in these namespaces, by default in all."""
        return ["nsenter", "--target", str(self.pid), *(spaces or self._spaces)]

    def ip(self, *arguments: str) -> None:
        """Change its network. Raises CalledProcessError."""
        subprocess.run([*self.enter("--net"), "ip", *arguments], check=True, capture_output=True, text=True)

    def end(self) -> None:
        """Kill all of its processes, at once. Safe to call twice."""
        self._keeper.kill()
        self._keeper.wait()


class Network:
    """A switch with hosts; a context manager that leaves nothing behind."""

    def __enter__(self) -> Self:
        self.hosts: list[Host] = []  # that have not been killed
        self._made = 0
        self.switch = _Space("the switch", ["--net"], "echo ready; exec sleep infinity", {})
        try:
            self.switch.ip("link", "add", "br0", "type", "bridge")
            self.switch.ip("link", "set", "br0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in list(self.hosts):
            host.kill()
        self.switch.end()

    def host(self, name: str, shared: str = "2g", disk: str = "2g") -> "Host":
        """Start another host. ``name``: 10 characters at most. ``shared``, ``disk``: sizes of its /dev/shm and /tmp,
        which take memory as they are used."""
        self._made += 1
        host = Host(self, name, self._made, shared, disk)
        self.hosts.append(host)
        host.plug_in()
        return host


class Host:
    """See ``Network.host``."""

    def __init__(self, network: Network, name: str, number: int, shared: str, disk: str) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self._switch = network.switch
        self._network = network
        self._cable: subprocess.Popen | None = None
        sizes = {"SHARED": shared, "DISK": disk}
        self._space = _Space(name, _SPACES, _SET_UP, {"NAME": name, "CODE": str(ROOT), **sizes}, number * _UPTIME_S)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "XDG_", "PYTEST_"))}
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"HOME": "/tmp/home", "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT), "PATH": commands}
        self.environment = {**kept, **own}

    def plug_in(self) -> None:
        """Connect a host that has just started."""
        self._switch.ip(
            "link", "add", "name", self.name, "type", "veth", "peer", "name", "eth0", "netns", str(self._space.pid)
        )
        self._switch.ip("link", "set", "dev", self.name, "up", "master", "br0")
        self._space.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self._space.ip("link", "set", "eth0", "up")

    def start(self, *command: str, folder: str = "/tmp", **options: Any) -> subprocess.Popen:
        """Run a command in a folder of the host. To kill what is returned kills the command."""
        enter = [*self._space.enter(), "--", "setpriv", "--pdeathsig", "KILL", "env", f"--chdir={folder}"]
        return subprocess.Popen([*enter, *command], env=self.environment, text=True, **options)

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """What a command prints. Raises CalledProcessError, with all that it has said, or TimeoutExpired."""
        running = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            said, _ = running.communicate(timeout=timeout)
        finally:
            running.kill()
        if running.returncode:
            raise subprocess.CalledProcessError(running.returncode, command, said, said)
        return said

    def processes(self) -> list[str]:
        """The names of those that run on it."""
        found = []
        for file in self.path("/proc").glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                found.append(file.read_text().strip())
        return found

    def path(self, path: str | Path) -> Path:
        """Where this process finds a file of the host."""
        return Path(f"/proc/{self._space.pid}/root", str(path).lstrip("/"))

    def sent_bytes(self) -> int:
        """What it has sent to other hosts so far."""
        line = next(line for line in self.run("cat", "/proc/net/dev").splitlines() if "eth0:" in line)
        return int(line.partition(":")[2].split()[8])

    def shape(self, *, round_trip_ms: float = 0.0, loss: float = 0.0, mbit: float = 0.0) -> None:
        """From now on the host's cable adds so much to each round trip, loses this share of the packets each way, and
        carries ``mbit`` million bits per second each way; without arguments, it is as it was at the start."""
        if self._cable is not None:
            self._cable.kill()
            self._cable.wait()
            self._cable = None
            self._switch.ip("link", "delete", "dev", self._near)
        if not (round_trip_ms or loss or mbit):
            self.join()
            return
        self._switch.ip("link", "set", "dev", self.name, "nomaster")
        self._switch.ip("link", "add", "name", self._near, "type", "veth", "peer", "name", self._far)
        for end in (self._near, self._far):
            self._switch.ip("link", "set", "dev", end, "up")
        if loss:  # of packets, not of the large frames of which the kernel makes them
            for host in self._network.hosts:
                host._space.ip("link", "set", "eth0", "gso_max_segs", "1")
        numbers = (round_trip_ms / 2000, loss, mbit * 1e6 / 8)
        wire = [sys.executable, "-S", "-E", str(_WIRE), self.name, self._near, *map(str, numbers)]
        self._cable = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *self._switch.enter("--net"), *wire])
        self.join()

    @property
    def _near(self) -> str:
        return f"{self.name}-near"

    @property
    def _far(self) -> str:
        return f"{self.name}-far"

    def cut_off(self) -> None:
        """From now on nothing reaches the host or leaves it, and nobody is told."""
        self._switch.ip("link", "set", "dev", self._far if self._cable else self.name, "nomaster")

    def join(self) -> None:
        """The end of ``cut_off``."""
        self._switch.ip("link", "set", "dev", self._far if self._cable else self.name, "master", "br0")

    def kill(self) -> None:
        """As if its power failed: others are not told by the last packets of its processes. Safe to call twice."""
        with contextlib.suppress(subprocess.CalledProcessError):  # it has ended before
            self.cut_off()
        if self._cable is not None:
            self._cable.kill()
            self._cable.wait()
        self._space.end()
        with contextlib.suppress(ValueError):
            self._network.hosts.remove(self)
