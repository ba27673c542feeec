"""The config group ``policy`` of a policy that another process serves."""

from typing import ClassVar, Literal

from pydantic import Field

from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec
from vla_rl.core.schema import Positive, PositiveFloat
from vla_rl.policies.base.config import PolicyConfigBase


class RemoteConfig(PolicyConfigBase):
    """A policy behind openpi's websocket protocol: `vla-rl serve`, openpi's own server, and others. For evaluation.

    Of the actions that the server predicts at once, the first chunk_size are executed.
    """

    elsewhere: ClassVar[bool] = True
    has_blocks: ClassVar[bool] = False

    name: Literal["remote"] = "remote"
    address: str = Field("ws://127.0.0.1:8000", description="Where the policy is served: ws://HOST:PORT, or wss://.")
    token_env: str | None = Field(
        None, description="Variable of the environment that holds the server's token, such as VLA_RL_TOKEN; null: none."
    )
    chunk_size: Positive = Field(
        5,
        description="Actions that are executed of each answer; not given: as the server's metadata says (chunk_size), "
        "else 5, as openpi's own evaluation of LIBERO.",
    )
    connections: Positive = Field(16, le=256, description="Connections of an inference server, one request in each.")
    timeout_s: PositiveFloat = Field(
        60.0, description="Longest wait for an answer; raise it for servers that compile at the first one."
    )

    def spec(self, env: EnvSpec) -> PolicySpec:
        """The record are the actions; what the server draws is not known here."""
        chunk = (self.chunk_size, env.action_dim)
        return PolicySpec(*chunk, {"actions": ArrayLayout("<f4", chunk)}, {})

    @property
    def trainable(self) -> bool:
        return False

    @property
    def origin(self) -> str:
        return self.address

    @property
    def discrete(self) -> bool:
        return False
