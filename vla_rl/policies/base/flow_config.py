"""Configuration keys of policies whose actions are denoised by flow matching."""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from vla_rl.core.errors import UserError
from vla_rl.core.files import json_or_empty, shapes_in_safetensors
from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec, RandomNumbers
from vla_rl.core.schema import ConfigGroup, Positive, PositiveFloat
from vla_rl.policies.base.config import PolicyConfigBase

STEERING_FILE = "steering.safetensors"  # in a checkpoint


class SteerConfig(ConfigGroup):
    """A network that chooses the noise from which a chunk is denoised; the rest of the policy is frozen (DSRL)."""

    width: Positive = Field(256, description="Width of its two layers.")
    bound: PositiveFloat = Field(
        1.5, description="Limit of its means; the policy was cloned with noise of deviation 1."
    )
    initial_std: PositiveFloat = Field(
        0.5, description="Standard deviation around them before training; it is learned."
    )


class FlowConfig(PolicyConfigBase):
    """A chunk is denoised in several steps. πRL (arXiv:2510.25889) makes steps of this sampler random, so that samples
    have log-probabilities: the density of the random steps is taken for the policy's.
    """

    has_blocks: ClassVar[bool] = False  # the library's blocks drop their keys and values then

    denoise_steps: Positive | None = Field(
        None, description="Denoising steps of an action chunk; null: as many as the checkpoint says."
    )
    noise: Literal["sde", "cps", "learned"] = Field(
        "sde",
        description="Where the noise of a random denoising step comes from. sde (Flow-SDE): a stochastic equation with "
        "the marginals of the deterministic one. cps (Flow-CPS): a part of the noise that is still there is replaced, "
        "in all steps but the last. learned (Flow-Noise): a trained head gives its deviation.",
    )
    noise_level: PositiveFloat = Field(
        0.5,
        description="sde: scale of the noise, a in sigma = a sqrt(t / (1 - t)). cps: the share of the noise that is "
        "replaced, at most 1.",
    )
    noise_low: PositiveFloat = Field(0.08, description="learned: smallest standard deviation of a random step.")
    noise_high: PositiveFloat = Field(0.16, description="learned: largest standard deviation of a random step.")
    random_steps: Literal["one", "last", "all"] = Field(
        "one",
        description="Which denoising steps are random, and recorded. one: a step drawn for each chunk; learning then "
        "evaluates the action expert once. last: the last step, whose noise no later step takes back. all: every step. "
        "With noise=cps, of those before the last.",
    )

    train_expert_only: bool | None = Field(
        None,
        description="Train the action expert and the heads alone, and leave the vision-language model as it is, as πRL "
        "does: less memory, and no backward pass through it; null: what a checkpoint's config.json says, else false.",
    )

    steer: SteerConfig | None = Field(
        None,
        description="Freeze the policy, and let a small network choose the noise from which it denoises (algo=dsrl); "
        "null: only if the checkpoint's folder has such a network (steering.safetensors).",
    )

    @model_validator(mode="after")
    def _limits_are_ordered(self) -> Self:
        if self.noise_low >= self.noise_high:
            raise ValueError(f"noise_low={self.noise_low} is not below noise_high={self.noise_high}: lower it")
        return self

    @model_validator(mode="after")
    def _noise_can_be_replaced(self) -> Self:
        if self.noise == "cps" and self.noise_level > 1.0:
            raise ValueError(f"noise=cps replaces at most all noise: lower noise_level={self.noise_level} to 1")
        if self.noise == "cps" and self.steps < 2:
            raise ValueError("noise=cps leaves the last denoising step without noise: raise denoise_steps=1")
        return self

    @property
    def steer_in_use(self) -> SteerConfig | None:
        """``steer``, or that of the network in the checkpoint's folder. It decides what is recorded.

        Raises UserError if that file is damaged.
        """
        path = Path(self.checkpoint or "") / STEERING_FILE
        if self.steer is not None or self.checkpoint is None or not path.is_file():
            return self.steer
        try:
            return SteerConfig(width=shapes_in_safetensors(path)["mean.weight"][1])
        except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
            raise UserError(f"{path} is damaged ({error}): copy the checkpoint again") from error

    @property
    def steered(self) -> bool:
        return self.steer_in_use is not None

    @property
    def regresses(self) -> bool:
        return self.steered

    @property
    def draws_normal(self) -> bool:
        return self.steered

    @property
    @abstractmethod
    def steps(self) -> int:
        """S, the number of denoising steps."""

    @property
    def expert_only(self) -> bool:
        """``train_expert_only``, or what a checkpoint's config.json says."""
        if self.train_expert_only is not None or self.checkpoint is None:
            return bool(self.train_expert_only)
        return json_or_empty(Path(self.checkpoint) / "config.json").get("train_expert_only") is True

    @property
    def memory_remedy(self) -> str:
        return "" if self.expert_only else "train the action expert alone with policy.train_expert_only=true"

    @abstractmethod
    def lengths(self, env: EnvSpec) -> tuple[int, int]:
        """H actions of D numbers, which the model denoises at once."""

    @property
    def recorded_steps(self) -> int:
        """R, the number of random steps of one chunk."""
        return self.noisy_steps if self.random_steps == "all" else 1

    @property
    def noisy_steps(self) -> int:
        """How many denoising steps, from the first on, can be random."""
        return self.steps - (self.noise == "cps")

    def spec(self, env: EnvSpec) -> PolicySpec:
        """With H actions of D numbers in the model, the record is, all of it normalized:

        chain    [R + 1, H, D], what the random steps started from and led to
        first    the number of the first random step
        actions  [K, A], the denoised chunk

        Of a policy whose noise is chosen it is

        noise    [1, D], of all H actions
        actions  [K, A], as above
        """
        chunk, steps, model = (self.chunk_size, env.action_dim), self.recorded_steps, self.lengths(env)
        if self.steered:
            noise = 1, model[1]
            steered = {"noise": ArrayLayout("<f4", noise), "actions": ArrayLayout("<f4", chunk)}
            return PolicySpec(*chunk, steered, {"noise": RandomNumbers(noise, "normal")})
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
