"""A profile: what each activity of a run costs, measured or derived. The planner and the simulation read it.

A profile is a YAML file (``configs/profiles``). Times are in seconds, memory is in GiB. It describes a machine; what a
run asks of that machine (batch sizes, episodes) is in the run's configuration.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field

from vla_rl.config.yaml_file import load_model
from vla_rl.core.files import replacing

Seconds = Annotated[float, Field(ge=0.0)]
GiB = Annotated[float, Field(ge=0.0)]

CURVES = (
    "simulate",
    "render",
    "infer",
    "train",
    "critic",
    "imagine",
    "model_train",
)  # fields that are a LinearCost
TIMES = ("reset", "step", "weight_sync", "onload", "offload")  # the fields that are plain seconds


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinearCost(_Part):
    """Seconds of a call of size n: ``fixed + each * n``; nothing for a call of size 0."""

    fixed: Seconds = 0.0
    each: Seconds

    def __call__(self, n: float) -> float:
        return self.fixed + self.each * n if n else 0.0

    def __mul__(self, factor: float) -> Self:
        return type(self)(fixed=self.fixed * factor, each=self.each * factor)


class Memory(_Part):
    """Memory of one device, and what a role takes of it, in GiB."""

    device: GiB = Field(description="Size of a device's memory.")
    weights: GiB = Field(description="Weights of the whole model, as inference and training hold them.")
    trained: GiB = Field(
        description="Gradients, optimizer state and, with bf16, master weights, on one unsharded rank."
    )
    infer_each: GiB = Field(0.0, description="One row of an inference batch.")
    train_each: GiB = Field(0.0, description="Activations of one chunk of a micro-batch, at the peak.")
    critic: GiB = Field(0.0, description="The critic of an off-policy algorithm, at the peak of its step.")
    kept: GiB = Field(0.0, description="Main memory of the learner's first rank for episodes that it keeps.")
    simulate_fixed: GiB = Field(0.0, description="A simulator process that runs on a device.")
    simulate_each: GiB = Field(0.0, description="One env of that process.")
    draw_each: GiB = Field(0.0, description="A simulator process that runs on cores and draws on a device.")


class Profile(_Part):
    """Costs of one simulator and one policy on one kind of device."""

    name: str
    gpu: str | None = Field(None, description="The kind of GPU, as `vla-rl plan --on` names it; null: not known.")
    fits: dict[str, str] = Field({}, description="Configuration keys and the values that a run has for which it holds.")
    simulator_on: Literal["cores", "devices"]
    simulate: LinearCost = Field(description="A chunk in each of n envs: on one core, or batched on a device.")
    render: LinearCost = Field(description="One observation of each of n envs.")
    render_on_cores: LinearCost | None = Field(
        None, description="The same on a core of a node without a GPU; null: as 'render'."
    )
    reset: Seconds = Field(description="The start of an episode.")
    infer: LinearCost = Field(description="An inference batch of n rows.")
    train: LinearCost = Field(description="Forward and backward pass of a micro-batch of n chunks.")
    critic: LinearCost = Field(
        LinearCost(each=0.0), description="A step of an off-policy algorithm's critic on n chunks; 0: not known."
    )
    imagine: LinearCost = Field(LinearCost(each=0.0), description="The world model's rating of n chunks.")
    model_train: LinearCost = Field(
        LinearCost(each=0.0), description="What the world model learns from n real chunks, without frames."
    )
    step: Seconds = Field(0.0, description="An optimizer step, including the reduction of gradients.")
    weight_sync: Seconds = Field(description="Weight sync, during which neither side computes.")
    onload: Seconds = Field(0.0, description="Inference's offload and the learner's onload, of one shared device.")
    offload: Seconds = Field(0.0, description="The learner's offload and inference's onload.")
    mean_length: Annotated[float, Field(ge=0.5, le=1.0)] = Field(
        0.75, description="Mean episode length as a share of the time limit; lengths are uniform up to the limit."
    )
    memory: Memory
    sources: dict[str, str] = Field({}, description="Where each number comes from.")

    def __hash__(self) -> int:
        return hash((self.name, self.simulate, self.infer, self.train))  # equality compares all fields

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names of costs that were derived or assumed: all that are not 0 and whose source does not say "measured"."""
        told = {"offload": self.sources.get("onload", "")} | self.sources  # one text may be of both
        costs = [name for name in (*CURVES, *TIMES) if getattr(self, name) not in (0.0, LinearCost(each=0.0))]
        return tuple(name for name in costs if not _is_measured(told.get(name, "")))

    def rendering(self, remote: bool) -> LinearCost:
        """What observing costs an env worker; a remote one has no GPU to draw on."""
        return self.render_on_cores if remote and self.render_on_cores is not None else self.render

    def scaled(self, factor: float) -> Self:
        """The profile with all times multiplied by ``factor``."""
        there = [name for name in (*CURVES, *TIMES, "render_on_cores") if getattr(self, name) is not None]
        return self.model_copy(update={name: getattr(self, name) * factor for name in there})


def _is_measured(source: str) -> bool:
    """Of a shipped profile, and of one that a run has measured ("the run NAME, 12 calls")."""
    return source.startswith("measured") or source.endswith(" calls")


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises UserError with all mistakes of the file."""
    return load_model(path, Profile, "a profile, such as those in configs/profiles")


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile in one step: a crash leaves the older file as it was."""
    with replacing(path) as partial:
        partial.write_text(yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))
