"""Encrypted sockets between relays and gateways: ZeroMQ with CURVE (curvezmq.org).

The keys are made for one run. A gateway knows the relays' public key and lets nobody else in. A relay knows the
gateways' public key, so that nobody can play a gateway.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

_HEARTBEAT_MS, _SILENT_MS = 2000, 10_000  # a connection that is silent for so long is made anew
_CONNECT_MS, _FIRST_RETRY_MS, _LAST_RETRY_MS = 5000, 100, 2000
_DOMAIN = "vla_rl"
_CURVE_BYTES = 64  # at most, by which encryption makes a frame larger; ZeroMQ's limit counts them
_MOST_WAITING = 10_000  # messages for a peer that does not read


@dataclass(frozen=True, slots=True)
class Keys:
    """One side's keys, and the public key of the other side."""

    public: bytes
    secret: bytes = field(repr=False)
    peer: bytes = field(repr=False)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """New keys: (of the gateways, of the relays)."""
        (gateway, its_secret), (relay, theirs) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(gateway, its_secret, relay), cls(relay, theirs, gateway)


class Door:
    """A gateway's socket, and who may connect."""

    def __init__(self, host: str, keys: Keys, most_bytes: int) -> None:
        """Listens at a free port of ``host``. ``most_bytes``: of a frame; a peer that sends more is disconnected.

        Raises zmq.ZMQError if that address cannot be listened at.
        """
        self._keys = keys
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self.socket = _new_socket(self._context, zmq.ROUTER, keys, host)
        self.socket.curve_server = True
        self.socket.zap_domain = _DOMAIN.encode()
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the authenticator, nobody comes in
        self.socket.maxmsgsize = most_bytes + _CURVE_BYTES
        self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer with this public key may come in."""
        return key == self._keys.peer

    def close(self) -> None:
        self.socket.close()
        self._authenticator.stop()
        self._context.term()


class Line:
    """A relay's socket, connected to a gateway. It connects again by itself."""

    def __init__(self, endpoint: str, keys: Keys, most_bytes: int) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self.socket = _new_socket(self._context, zmq.DEALER, keys, endpoint.removeprefix("tcp://").rpartition(":")[0])
        self.socket.curve_serverkey = keys.peer
        self.socket.maxmsgsize = most_bytes + _CURVE_BYTES
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def receive(socket: zmq.Socket) -> list[bytes] | None:
    """The frames of the next message; None if there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def send(socket: zmq.Socket, frames: list[Any]) -> bool:
    """Whether the frames were taken; they are not if the peer is away and does not read."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.ZMQError:
        return False
    return True


def _new_socket(context: zmq.Context, kind: int, keys: Keys, host: str) -> zmq.Socket:
    """``host``: to listen at, or to connect to."""
    socket: zmq.Socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = ":" in host
    socket.sndhwm = socket.rcvhwm = _MOST_WAITING
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENT_MS
    socket.connect_timeout = _CONNECT_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = _FIRST_RETRY_MS, _LAST_RETRY_MS
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    return socket
