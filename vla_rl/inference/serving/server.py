"""The socket: who may connect, how many, how large a message may be, and which protocol is spoken where.

ws://HOST:PORT/ speaks openpi's protocol, ws://HOST:PORT/vla-eval vla-eval's. GET /healthz (and /health) says OK.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from vla_rl.core.wire import MAX_BYTES
from vla_rl.inference.serving import openpi, vla_eval
from vla_rl.inference.serving.batched_policy import BatchedPolicy, Full

_SESSIONS = {"/": openpi.session, "/vla-eval": vla_eval.session}
_HEALTH = ("/healthz", "/health")
_OPENING_S = 10.0  # for the handshake
_PING_S, _PONG_S = 30.0, 300.0  # a simulator that is being built answers no ping for a while
_CLOSING_S = 3.0


@dataclass(frozen=True, slots=True)
class Door:
    """Where the server listens, and for whom. ``port`` 0: one that is free. ``token`` None: for everybody."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)


# consumes: connections. waits for: the policy's end. unblocked by: stopped, an error of the policy.
async def serve_policy(
    policy: BatchedPolicy, door: Door, stopped: asyncio.Event, listening: Callable[[int], None]
) -> None:
    """Serve until ``stopped`` is set; ``listening`` is called with the port.

    Raises OSError if the address cannot be listened at, and what the policy raises.
    """

    async def handle(connection: ServerConnection) -> None:
        assert connection.request is not None
        try:
            with policy.seat() as seat:
                await _SESSIONS[connection.request.path](connection, seat)
        except Full:
            await connection.close(CloseCode.TRY_AGAIN_LATER, "all connections are taken; see --connections")
        except ConnectionClosed:
            return

    server = await serve(
        handle,
        door.host,
        door.port,
        process_request=lambda connection, request: _refusal(door, connection, request),
        compression=None,
        max_size=MAX_BYTES,
        max_queue=2,
        open_timeout=_OPENING_S,
        ping_interval=_PING_S,
        ping_timeout=_PONG_S,
        close_timeout=_CLOSING_S,
    )
    answering, stopping = asyncio.create_task(policy.run()), asyncio.create_task(stopped.wait())
    try:
        listening(server.sockets[0].getsockname()[1])
        await asyncio.wait((answering, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.close()
        await asyncio.wait((asyncio.create_task(server.wait_closed()),), timeout=_CLOSING_S)
        policy.stop()
        stopping.cancel()
    await answering


def _refusal(door: Door, connection: ServerConnection, request: Request) -> Response | None:
    """An answer in place of a connection; None admits the client."""
    if request.path in _HEALTH:
        return connection.respond(HTTPStatus.OK, "OK\n")
    if door.token is not None and not _has_token(request, door.token):
        text = 'this server needs its token: the header "Authorization: Api-Key TOKEN", or ws://token:TOKEN@HOST:PORT\n'
        response = connection.respond(HTTPStatus.UNAUTHORIZED, text)
        response.headers["WWW-Authenticate"] = "Basic"
        return response
    if request.path not in _SESSIONS:
        return connection.respond(HTTPStatus.NOT_FOUND, f"there are {', '.join((*_SESSIONS, *_HEALTH))}\n")
    return None


def _has_token(request: Request, token: str) -> bool:
    """Compared in constant time. openpi's client sends an Api-Key; an address with a password gives Basic."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif kind.lower() != "api-key":
        return False
    return hmac.compare_digest(given.encode(), token.encode())
