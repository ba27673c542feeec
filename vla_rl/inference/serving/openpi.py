"""openpi's protocol: the server tells what it is, then answers each request in one message.

    server ──▶ metadata
    client ──▶ {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
    server ──▶ {"actions": float64 [K, A], "server_timing": {"infer_ms"}}, or a text: what is wrong

Its own server closes the connection after an error. Here the client may go on.
"""

import time
from typing import Any

from websockets.asyncio.server import ServerConnection

from vla_rl.core.wire import ACTIONS, PROMPT, STATE, WireError, image_keys, pack, unpack
from vla_rl.inference.serving.batched_policy import Seat
from vla_rl.inference.serving.offer import Offer, RequestError


def metadata(offer: Offer) -> dict[str, Any]:
    """What a client gets first. openpi leaves the keys to the server."""
    spec = offer.spec
    return {
        "server": "vla_rl",
        "simulator": spec.name,
        "images": dict(zip(image_keys(spec.views), spec.views, strict=True)),
        "image_size": spec.image_size,
        "state_dim": spec.proprio_dim,
        "chunk_size": offer.chunk_size,
        "actions": list(spec.actions.names),
        "grippers": {str(i): [g.open, g.closed] for i, g in spec.actions.data_grippers().items()},
        "instructions": list(spec.instructions),
    }


# consumes: requests of one client. waits for: them. unblocked by: a request, the connection's end.
async def session(connection: ServerConnection, seat: Seat) -> None:
    """Talk until the client leaves. Raises ConnectionClosed."""
    keys = image_keys(seat.offer.spec.views)
    await connection.send(pack(metadata(seat.offer)))
    async for message in connection:
        start = time.monotonic()
        try:
            row = seat.offer.row(_request(message), keys, STATE, PROMPT)
            actions = await seat.actions(row)
        except (WireError, RequestError) as error:
            await connection.send(str(error))
            continue
        timing = {"infer_ms": (time.monotonic() - start) * 1e3}
        await connection.send(pack({ACTIONS: actions, "server_timing": timing}))


def _request(message: str | bytes) -> dict:
    request = unpack(message) if isinstance(message, bytes) else message
    if not isinstance(request, dict):
        raise RequestError(f"a request is a map in msgpack, not {type(request).__name__}")
    return request
