"""The config group ``policy`` of π0."""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec, RandomNumbers
from vla_rl.core.schema import Positive, PositiveFloat
from vla_rl.policies.base.config import PolicyConfigBase

LENGTHS = {"chunk_size": 50, "max_action_dim": 32, "max_state_dim": 32}  # the library does not write its defaults


def model_length(checkpoint: str | None, name: str) -> int | None:
    """A length of a checkpoint in either layout; None without one. What cannot be read, opening it says."""
    if checkpoint is None:
        return None
    ours, theirs = (_json_or_empty(Path(checkpoint) / file) for file in ("architecture.json", "config.json"))
    found = ours["model"].get(name, LENGTHS[name]) if isinstance(ours.get("model"), dict) else theirs.get(name)
    return found if isinstance(found, int) else None


def _json_or_empty(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class Pi0Config(PolicyConfigBase):
    """π0 (arXiv:2410.24164), a flow policy; its sampler is stochastic, so that samples have log-probabilities (πRL).

    A chunk is denoised in ``denoise_steps`` steps. πRL (arXiv:2510.25889) makes steps of this sampler random, and takes
    the density of the random steps for the policy's.
    """

    recomputes_blocks: ClassVar[bool] = False  # the library's blocks drop their keys and values then

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
    denoise_steps: Positive = Field(4, description="Denoising steps of an action chunk.")
    noise: Literal["sde", "learned"] = Field(
        "sde",
        description="Where the noise of a random denoising step comes from. sde (Flow-SDE): a stochastic equation with "
        "the marginals of the deterministic one. learned (Flow-Noise): a trained head gives its deviation.",
    )
    noise_level: PositiveFloat = Field(0.5, description="sde: scale of the noise, a in sigma = a sqrt(t / (1 - t)).")
    noise_low: PositiveFloat = Field(0.08, description="learned: smallest standard deviation of a random step.")
    noise_high: PositiveFloat = Field(0.16, description="learned: largest standard deviation of a random step.")
    random_steps: Literal["one", "all"] = Field(
        "one",
        description="Which denoising steps are random, and recorded. one: a step drawn for each chunk; learning then "
        "evaluates the action expert once. all: every step.",
    )

    @model_validator(mode="after")
    def _limits_are_ordered(self) -> Self:
        if self.noise_low >= self.noise_high:
            raise ValueError(f"noise_low={self.noise_low} is not below noise_high={self.noise_high}: lower it")
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
    def recorded_steps(self) -> int:
        """R, the number of random steps of one chunk."""
        return 1 if self.random_steps == "one" else self.denoise_steps

    def spec(self, env: EnvSpec) -> PolicySpec:
        """With H actions of D numbers in the model, the record is, all of it normalized:

        chain    [R + 1, H, D], what the random steps started from and led to
        first    the number of the first random step
        actions  [K, A], the denoised chunk
        """
        chunk, steps = (self.chunk_size, env.action_dim), self.recorded_steps
        model = self.horizon_in_use, self.padded_dim_in_use(env)
        record = {
            "chain": ArrayLayout("<f4", (steps + 1, *model)),
            "first": ArrayLayout("<i4", ()),
            "actions": ArrayLayout("<f4", chunk),
        }
        draws = {
            "start": RandomNumbers(model, "normal"),
            "which": RandomNumbers(()),
            "steps": RandomNumbers((steps, *model), "normal"),
        }
        return PolicySpec(*chunk, record, draws)

    @property
    def discrete(self) -> bool:
        return False

    @property
    def size_name(self) -> str:
        return f"pi0 {self.size}"
