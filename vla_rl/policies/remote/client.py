"""The client's side of openpi's protocol: several connections, with one request in each at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from vla_rl.core.errors import UserError
from vla_rl.core.records import Array
from vla_rl.core.wire import ACTIONS, MAX_BYTES, WireError, pack, unpack
from vla_rl.policies.remote.config import RemoteConfig

_OPENING_S = 10.0


class _TooMany(UserError):
    """The server takes no more connections."""


class RemoteClient:
    """Asks the server of ``config`` for action chunks of ``action_dim`` numbers. Connects when it is used.

    Every method raises UserError, which names the address, if the server is away, silent or answers otherwise.
    """

    def __init__(self, config: RemoteConfig, action_dim: int) -> None:
        self._config, self._action_dim = config, action_dim
        self._connections: list[ClientConnection] = []
        self._open = contextlib.ExitStack()
        self._is_full = False

    def metadata(self) -> dict[Any, Any]:
        """What the server says of itself; openpi's own often says nothing."""
        found = self._connected()[1]
        self.close()
        return found

    # waits for: answers. unblocked by: them, policy.timeout_s, the end of a connection.
    def chunks(self, requests: Sequence[Mapping[str, Any]]) -> Array:
        """float64 [N, K, A], as data sets of the simulator have them. As many requests as there are connections are
        under way at once."""
        self._grow(min(len(requests), self._config.connections))
        found, waiting = [], list(requests)
        while waiting:
            wave = list(zip(self._connections, waiting, strict=False))
            try:
                for connection, request in wave:
                    connection.send(pack(request))
                answers = [connection.recv(self._config.timeout_s) for connection, _ in wave]
            except (OSError, WebSocketException) as error:
                self.close()
                raise self._error(f"no answer: {_named(error)}") from None
            found += [self._actions(answer) for answer in answers]
            waiting = waiting[len(wave) :]
        return np.stack(found)

    def _grow(self, wanted: int) -> None:
        """To ``wanted`` connections; fewer if the server has no more for this client."""
        while len(self._connections) < wanted and not self._is_full:
            try:
                self._connections.append(self._connected()[0])
            except _TooMany:
                if not self._connections:
                    raise
                self._is_full = True

    def close(self) -> None:
        self._connections, self._is_full = [], False
        self._open.close()

    def _connected(self) -> tuple[ClientConnection, dict[Any, Any]]:
        token = _token(self._config)
        try:
            opening = connect(
                self._config.address,
                compression=None,
                max_size=MAX_BYTES,
                additional_headers={"Authorization": f"Api-Key {token}"} if token else None,
                open_timeout=_OPENING_S,
                ping_interval=None,  # openpi's server answers none while its policy computes
                close_timeout=1.0,
                proxy=None,
            )
            connection: ClientConnection = self._open.enter_context(opening)
            first = connection.recv(self._config.timeout_s)
        except (OSError, WebSocketException, ValueError) as error:
            full = isinstance(error, ConnectionClosed) and error.rcvd and error.rcvd.code == CloseCode.TRY_AGAIN_LATER
            text = f"cannot be reached: {_named(error)}; start it there, or set policy.address"
            raise self._error(text, _TooMany if full else UserError) from None
        return connection, self._unpacked(first)

    def _actions(self, answer: str | bytes) -> Array:
        """float64 [K, A] of an answer."""
        wanted = self._config.chunk_size
        actions = self._unpacked(answer).get(ACTIONS)
        if not isinstance(actions, np.ndarray) or actions.dtype.kind not in "iuf" or actions.ndim != 2:
            what = (
                f"{actions.dtype} {list(actions.shape)}" if isinstance(actions, np.ndarray) else type(actions).__name__
            )
            raise self._error(f"its {ACTIONS} are {what}: need numbers [K, {self._action_dim}]")
        if actions.shape[1] != self._action_dim:
            raise self._error(f"its actions have {actions.shape[1]} numbers, the simulator's {self._action_dim}")
        if len(actions) < wanted:
            raise self._error(f"it predicts {len(actions)} actions at once (lower policy.chunk_size={wanted})")
        if not np.isfinite(actions).all():
            raise self._error("its actions are not finite")
        return actions[:wanted].astype(np.float64)

    def _unpacked(self, answer: str | bytes) -> dict[Any, Any]:
        if isinstance(answer, str):
            raise self._error(f"it refuses the observation: {' '.join(answer.splitlines()[-3:])[-500:]}")
        try:
            found = unpack(answer)
        except WireError as error:
            raise self._error(f"no server of openpi's protocol: {error}") from None
        if not isinstance(found, dict):
            raise self._error(f"no server of openpi's protocol: it sends {type(found).__name__}")
        return found

    def _error(self, text: str, kind: type[UserError] = UserError) -> UserError:
        return kind(f"policy.address={self._config.address}: {text}")


def _token(config: RemoteConfig) -> str | None:
    if config.token_env is None:
        return None
    token = os.environ.get(config.token_env)
    if not token:
        raise UserError(f"policy.token_env={config.token_env}: this variable is not set; export it, or set null")
    return token


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
