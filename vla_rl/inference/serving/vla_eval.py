"""The protocol of vla-eval's harness (version 1): every message has a type, a payload and a number that its answer
repeats.

    client ──▶ hello           server ──▶ hello: which observations the benchmark should send
    client ──▶ episode_start
    client ──▶ observation     server ──▶ action: float64 [A], or error: what is wrong
    client ──▶ episode_end

The harness observes after each control step. A chunk is executed to its end before the policy is asked again.
"""

import time
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.server import ServerConnection

from vla_rl.core.records import Array, EnvSpec
from vla_rl.core.wire import WireError, pack, unpack
from vla_rl.inference.serving.batched_policy import Seat
from vla_rl.inference.serving.offer import Offer, RequestError, Row

_VERSION = 1
_WRIST = "wrist"  # its name for LIBERO's second camera
_STATES, _STATE, _TASK = "states", "state", "task_description"


class _Episode:
    """What is left of the chunk under way."""

    def __init__(self, seat: Seat) -> None:
        self._seat, self._left = seat, list[Array]()

    def start(self) -> None:
        self._left = []

    async def action(self, observation: Any) -> Array:
        """float64 [A]. Raises RequestError."""
        if not self._left:
            self._left = list(await self._seat.actions(_row(self._seat.offer, observation)))
        return self._left.pop(0)


# consumes: messages of one client. waits for: them. unblocked by: a message, the connection's end.
async def session(connection: ServerConnection, seat: Seat) -> None:
    """Talk until the client leaves. Raises ConnectionClosed."""
    episode = _Episode(seat)
    async for message in connection:
        number = 0
        try:
            kind, payload, number = _parts(message)
            match kind:
                case "hello":
                    answer = "hello", _hello(seat.offer)
                case "observation":
                    answer = "action", {"actions": await episode.action(payload)}
                case "episode_start" | "episode_end" | "error":
                    episode.start()
                    continue
                case _:
                    raise RequestError(f"type: {kind[:40]!r} is none of hello, episode_start, observation, episode_end")
        except (WireError, RequestError) as error:
            answer = "error", {"error": str(error)}
        await connection.send(_message(*answer, number))


def _parts(message: str | bytes) -> tuple[str, Any, int]:
    """Type, payload and number."""
    raw = unpack(message) if isinstance(message, bytes) else message
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str) or type(raw.get("seq")) is not int:
        raise RequestError('a message is a map in msgpack with "type", "payload", "seq" and "timestamp"')
    return raw["type"], raw.get("payload"), raw["seq"]


def _message(kind: str, payload: Mapping[str, Any], number: int) -> bytes:
    return pack({"type": kind, "payload": payload, "seq": number, "timestamp": time.time()}, text_keys=True)


def _hello(offer: Offer) -> dict[str, Any]:
    spec = offer.spec
    wanted = {"send_wrist_image": len(spec.views) > 1, "send_state": spec.proprio_dim > 0}
    return {
        "harness_version": "vla_rl",
        "protocol_version": _VERSION,
        "model_server": f"vla_rl, {spec.name}",
        "capabilities": {},
        "observation_params": wanted,
    }


def _row(offer: Offer, observation: Any) -> Row:
    images = observation.get("images") if isinstance(observation, dict) else None
    if not isinstance(images, dict):
        raise RequestError('images: need a map of images by camera, such as {"agentview": ...}')
    parts = {f"images/{name}": image for name, image in images.items()}
    state = _STATES if _STATES in observation else _STATE  # LIBERO's benchmark has the former, others the latter
    return offer.row(observation | parts, _image_keys(offer.spec), state, _TASK)


def _image_keys(spec: EnvSpec) -> list[str]:
    names = [spec.views[0], *([_WRIST] if len(spec.views) > 1 else []), *spec.views[2:]]
    return [f"images/{name}" for name in names]
