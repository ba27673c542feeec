"""What each activity costs, as measured or as derived: the input of the planner and of simulations.

A profile is a YAML file (``configs/profiles``). Times are seconds, memory is GiB. It says what a machine does;
what a run asks of it (batch sizes, episodes) is in the run's configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from vla_rl.config.run_config import RunConfig
from vla_rl.config.yaml_file import load_model
from vla_rl.core.machine import GIB, Machine

Seconds = Annotated[float, Field(ge=0.0)]
GiB = Annotated[float, Field(ge=0.0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Curve(_Part):
    """Cost of n things done at once: ``fixed + each * n``."""

    fixed: Seconds = 0.0
    each: Seconds

    def __call__(self, n: float) -> float:
        return self.fixed + self.each * n if n else 0.0


class Memory(_Part):
    """Of one device, GiB."""

    device: GiB = Field(description="What a device has.")
    weights: GiB = Field(description="Of the whole model, as inference and training hold it.")
    trained: GiB = Field(description="Gradients and optimizer state of all that trains, on one rank without sharding.")
    infer_each: GiB = Field(0.0, description="A row of an inference batch.")
    train_each: GiB = Field(0.0, description="A chunk of a micro-batch: activations.")
    simulate_fixed: GiB = Field(0.0, description="A simulator process, where it runs on a device.")
    simulate_each: GiB = Field(0.0, description="A slot of it.")


class Profile(_Part):
    """Costs of one simulator and one policy on one kind of device."""

    name: str
    simulator_on: Literal["cores", "devices"]
    simulate: Curve = Field(description="A chunk in each of n slots of a process: on one core, or batched on a device.")
    render: Curve = Field(description="One observation of each of n slots.")
    reset: Seconds = Field(description="The start of an episode.")
    infer: Curve = Field(description="A batch of n observations.")
    train: Curve = Field(description="Forward and backward pass of a micro-batch of n chunks.")
    step: Seconds = Field(0.0, description="An optimizer step, with the reduction of gradients.")
    transfer: Seconds = Field(description="Hand-over of new weights, during which neither side computes.")
    onload: Seconds = Field(0.0, description="A device's change from inference to the learner, and all that they hold.")
    offload: Seconds = Field(0.0, description="The change back.")
    mean_length: Annotated[float, Field(ge=0.5, le=1.0)] = Field(
        0.75, description="Of an episode, as a share of the time limit; lengths spread evenly up to the limit."
    )
    memory: Memory
    sources: dict[str, str] = Field({}, description="Where each number comes from.")

    def __hash__(self) -> int:
        return hash((self.name, self.simulate, self.infer, self.train))  # equality looks at all fields

    def dilated(self, factor: float) -> Profile:
        """All times ``factor`` as long."""

        def stretched(value: object) -> object:
            if isinstance(value, Curve):
                return Curve(fixed=value.fixed * factor, each=value.each * factor)
            return value * factor if isinstance(value, float) else value

        times = ("simulate", "render", "reset", "infer", "train", "step", "transfer", "onload", "offload")
        return self.model_copy(update={name: stretched(getattr(self, name)) for name in times})


def load_profile(path: Path) -> Profile:
    """Raises UserError with all mistakes of the file."""
    return load_model(path, Profile, "a profile, such as those in configs/profiles")


def save_profile(profile: Profile, path: Path) -> None:
    path.write_text(yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))


def memory_of(config: RunConfig, policy: Any) -> Memory:
    """By sizes alone: gradients in the dtype of the weights, two moments and, beside bfloat16, master weights."""
    machine = Machine.detect()
    device = machine.gpus[0].memory if machine.gpus else machine.memory
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    each = 4 + 8 if config.learner.precision == "fp32" else 2 + 8 + 4
    trained = sum(p.numel() for p in policy.trained_parameters().values()) * each
    return Memory(device=device / GIB, weights=weights / GIB, trained=trained / GIB)
