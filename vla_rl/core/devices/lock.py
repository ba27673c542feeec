"""Device leases: of the processes that share a device, one computes and the others wait in the order of their requests.

    learner ──"acquire"──▶ ┌──────────────────────┐ ◀──"acquire"── inference server
            ◀──"granted"── │ a queue for a device │
            ──"release"──▶ └──────────────────────┘ ──"granted"──▶

A process that dies loses its connection, and with it its lease or its place in the queue: no lease outlives its owner.
A lease costs two messages over a local socket: tens of microseconds, compared with milliseconds for a micro-batch.
"""

import contextlib
import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

# How a component leases the device it computes on: ``with lease(): ...``. On a device of its own, ``nullcontext``.
DeviceLease = Callable[[], AbstractContextManager[None]]

_ACQUIRE, _RELEASE, _ASK, _GRANTED = b"a", b"r", b"?", b"g"
_MESSAGE_BYTES = 4096


@dataclass(slots=True)
class DeviceUse:
    """Totals of one device; times in seconds."""

    leases: int = 0
    held: float = 0.0
    waited: float = 0.0  # by all processes together
    longest_wait: float = 0.0
    died: int = 0  # leases that ended because their owner died


@dataclass(slots=True)
class _Client:
    connection: socket.socket
    device: str = ""
    name: str = ""
    asked: float = 0.0


@dataclass(slots=True)
class _Device:
    queue: deque[_Client] = field(default_factory=deque)
    holder: _Client | None = None
    since: float = 0.0
    use: DeviceUse = field(default_factory=DeviceUse)


class DeviceLockServer:
    """The queues of all devices of a node, served by a thread of the process that creates it."""

    def __init__(self, path: Path) -> None:
        """``path``: of the socket; the kernel allows 107 characters."""
        self.path = path
        self._devices: dict[str, _Device] = {}
        self._lock = threading.Lock()  # guards the totals, which other threads read
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._bell, self._door = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._door, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="device lock", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; waiting processes get a ConnectionError. Safe to call twice."""
        if self._thread.is_alive():
            self._bell.send(b"x")
            self._thread.join(timeout=5.0)

    def use(self) -> dict[str, dict[str, float]]:
        """The totals (``DeviceUse``) of every device so far, including the current lease."""
        with self._lock:
            now = time.monotonic()
            return {
                name: asdict(d.use) | {"held": d.use.held + (now - d.since if d.holder else 0.0)}
                for name, d in self._devices.items()
            }

    # consumes: messages. waits for: the sockets. unblocked by: any client, a client's death, stop().
    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._door:
                    self._close_all()
                    return
                with self._lock:
                    if key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        self._selector.register(connection, selectors.EVENT_READ, _Client(connection))
                    else:
                        self._receive(key.data)

    def _receive(self, client: _Client) -> None:
        try:
            message = client.connection.recv(_MESSAGE_BYTES)
        except ConnectionError:
            message = b""
        if not message:
            self._gone(client)
        elif not client.device:
            hello = json.loads(message)
            client.device, client.name = hello["device"], hello["name"]
            self._devices.setdefault(client.device, _Device())
        elif message == _ACQUIRE:
            client.asked = time.monotonic()
            self._devices[client.device].queue.append(client)
            self._grant(self._devices[client.device])
        elif message == _RELEASE:
            self._release(self._devices[client.device])
        elif message == _ASK:
            self._tell(client, self._describe(self._devices[client.device]).encode())

    def _grant(self, device: _Device) -> None:
        """Grant the next lease if the device is free."""
        while device.holder is None and device.queue:
            client = device.queue.popleft()
            device.holder, device.since = client, time.monotonic()
            waited = device.since - client.asked
            device.use.leases += 1
            device.use.waited += waited
            device.use.longest_wait = max(device.use.longest_wait, waited)
            self._tell(client, _GRANTED)  # if it has died, its closed connection is the next event

    def _release(self, device: _Device) -> None:
        device.use.held += time.monotonic() - device.since
        device.holder = None
        self._grant(device)

    def _gone(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        device = self._devices.get(client.device)
        if device is None:
            return
        if client in device.queue:
            device.queue.remove(client)
        if device.holder is client:
            device.use.died += 1
            self._release(device)

    @staticmethod
    def _tell(client: _Client, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            client.connection.send(message)

    @staticmethod
    def _describe(device: _Device) -> str:
        if device.holder is None:
            return "nobody holds it"
        held = time.monotonic() - device.since
        return f"{device.holder.name} has held it for {held:.1f} s, {len(device.queue)} wait"

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._bell.close()
        self.path.unlink(missing_ok=True)


class DeviceLock:
    """The side of a process that shares a device; for one thread."""

    def __init__(self, path: Path, device: str, name: str) -> None:
        """``name``: of this process, for messages. Raises ConnectionError or FileNotFoundError without a server."""
        self.device, self.name = device, name
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(path))
        self._connection.send(json.dumps({"device": device, "name": name}).encode())

    @contextlib.contextmanager
    def lease(self, timeout: float) -> Iterator[None]:
        """Hold the device within the block.

        Raises TimeoutError, which names the holder, after ``timeout`` seconds, and ConnectionError if the server ends.
        """
        self._acquire(timeout)
        try:
            yield
        finally:
            self._connection.send(_RELEASE)

    def close(self) -> None:
        """Close the connection, and give up the lease or the place in the queue."""
        self._connection.close()

    def _acquire(self, timeout: float) -> None:
        self._connection.send(_ACQUIRE)
        self._connection.settimeout(timeout)
        try:
            if self._receive() == _GRANTED:
                return
        except TimeoutError:
            pass
        self._connection.settimeout(5.0)
        self._connection.send(_ASK)
        answer = self._receive()
        if answer == _GRANTED:  # just after the timeout
            self._receive()  # the reply to _ASK
            return
        self.close()
        raise TimeoutError(f"{self.name} waited {timeout:.1f} s for {self.device}: {answer.decode()}")

    def _receive(self) -> bytes:
        message = self._connection.recv(_MESSAGE_BYTES)
        if not message:
            raise ConnectionError(f"{self.name} waits for {self.device}, but the lock server has ended")
        return message
