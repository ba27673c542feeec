"""The config group ``policy`` of π0."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from vla_rl.core.files import json_or_empty
from vla_rl.core.records import EnvSpec
from vla_rl.core.schema import Positive
from vla_rl.policies.base.flow_config import FlowConfig

LENGTHS = {"chunk_size": 50, "max_action_dim": 32, "max_state_dim": 32}  # the library does not write its defaults


def model_length(checkpoint: str | None, name: str) -> int | None:
    """A length of a checkpoint in either layout; None without one. What cannot be read, opening it says."""
    if checkpoint is None:
        return None
    ours, theirs = (json_or_empty(Path(checkpoint) / file) for file in ("architecture.json", "config.json"))
    found = ours["model"].get(name, LENGTHS[name]) if isinstance(ours.get("model"), dict) else theirs.get(name)
    return found if isinstance(found, int) else None


def denoising_steps(checkpoint: str | None) -> int:
    """What a checkpoint says about it."""
    found = 4
    if checkpoint is not None:
        ours, theirs = (json_or_empty(Path(checkpoint) / file) for file in ("architecture.json", "config.json"))
        found = ours.get("denoise_steps", theirs.get("num_inference_steps", found))
    return found


class Pi0Config(FlowConfig):
    """π0 (arXiv:2410.24164), a flow policy."""

    name: Literal["pi0"] = "pi0"
    size: Literal["nano", "base"] = Field("nano", description="Architecture of a policy with random weights.")
    horizon: Positive | None = Field(
        None,
        description="Actions that the model denoises at once, of which chunk_size are executed; null: the "
        "checkpoint's, or chunk_size.",
    )
    padded_dim: Positive | None = Field(
        None,
        description="Numbers of an action in the model, the first of which are used; null: the checkpoint's, or the "
        "simulator's.",
    )

    @model_validator(mode="after")
    def _horizon_holds_the_chunk(self) -> Self:
        if self.horizon is not None and self.horizon < self.chunk_size:
            raise ValueError(f"horizon={self.horizon} is shorter than chunk_size={self.chunk_size}: raise it")
        return self

    @property
    def horizon_in_use(self) -> int:
        """``horizon``, or what the checkpoint says. It decides what is recorded."""
        return self.horizon or model_length(self.checkpoint, "chunk_size") or self.chunk_size

    def padded_dim_in_use(self, env: EnvSpec) -> int:
        """``padded_dim``, or what the checkpoint says. It decides what is recorded."""
        return self.padded_dim or model_length(self.checkpoint, "max_action_dim") or env.action_dim

    @property
    def steps(self) -> int:
        return self.denoise_steps or denoising_steps(self.checkpoint)

    def lengths(self, env: EnvSpec) -> tuple[int, int]:
        return self.horizon_in_use, self.padded_dim_in_use(env)

    @property
    def size_name(self) -> str:
        return f"pi0 {self.size}"
