"""Configuration keys that algorithms share: those of all, and those of policy gradients."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, get_args

import numpy as np
from pydantic import Field, model_validator

from vla_rl.core.records import Array, BootstrapRule, EnvSpec, GroupRules, TeacherRule
from vla_rl.core.schema import INPUT_PATH, ConfigGroup, Positive, PositiveFloat

RatioLevel = Literal["token", "action", "chunk"]  # what one element of the policy's loss covers
WeightLevel = Literal[RatioLevel, "episode"]  # what one importance weight covers, the finest first


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """How much of a super-batch's work an update does, as a planner counts it."""

    epochs: float  # passes with gradients over each chunk
    minibatches: int  # optimizer steps of each
    extra_passes: float  # forward passes over each chunk
    reference: bool  # whether the initial policy is kept
    step_rows: int = 0  # chunks of an optimizer step; 0: any number, in passes of learner.micro_batch
    pass_rows: int = 0  # of these, chunks that pass the policy at a time
    critic_rows: float = 0.0  # chunks of a critic's steps, of step_rows each
    critic_passes: int = 0  # forward passes of the policy for each of these


class AlgoConfigBase(ConfigGroup):
    """What the rest of the system asks of any algorithm's configuration."""

    conditions: ClassVar[tuple[str, ...]] = ("",)  # what an algorithm may append to instructions

    one_rank: ClassVar[bool] = False  # whether its learner is a single process
    remembers: ClassVar[bool] = False  # whether it keeps episodes and trains on any of them, whatever policy played

    name: str

    @abstractmethod
    def work(self, chunk_size: int) -> UpdateWork:
        """What an update computes for each new chunk, of ``chunk_size`` control steps."""

    @property
    def takes_stale_data(self) -> bool:
        """Whether updates are right for data of earlier policies."""
        return True

    def prompts(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """Instructions under every condition: number ``condition * tasks + task``."""
        return tuple(text + condition for condition in self.conditions for text in instructions)

    def acting_condition(self, policy_version: int) -> int:
        """Under which of ``conditions`` a version of the policy acts."""
        return 0

    def demonstration_conditions(self, draws: Array) -> Array:
        """Conditions under which a run clones chunks of demonstrations (``bc_coef``), from one uniform number each."""
        return np.zeros(len(draws), np.int64)

    def warm_start_conditions(self, draws: Array) -> Array:
        """Conditions under which `vla-rl sft` does."""
        return self.demonstration_conditions(draws)

    def chunk_discount(self, chunk_size: int) -> float:
        """Of what follows a chunk of ``chunk_size`` control steps."""
        return 1.0

    @property
    def groups(self) -> GroupRules:
        """Which episodes form a group."""
        return GroupRules()

    @property
    def bootstrap_rule(self) -> BootstrapRule:
        """Which episodes end with the value of their final observation."""
        return "never"

    @property
    def reads_state(self) -> bool:
        """Whether training reads the simulator's state (``VectorEnv.state``)."""
        return False

    def check_simulator(self, spec: EnvSpec) -> None:
        """Raise UserError if the simulator lacks what the algorithm needs."""

    @property
    def teacher(self) -> TeacherRule | None:
        """How often the simulator's expert takes over in training episodes; None: never."""
        return None


class AlgorithmConfig(AlgoConfigBase):
    """What every algorithm has that trains on super-batches. Each derives its own configuration from this, or from one
    of its children."""

    entropy_coef: float = Field(0.0, ge=0.0, description="Coefficient of the entropy bonus.")
    entropy_decay: Positive | None = Field(
        None, description="Iterations over which entropy_coef falls to 0, linearly; null: it stays."
    )
    epochs: Positive = Field(1, description="Passes over a super-batch.")
    minibatches: Positive = Field(4, description="Optimizer steps per epoch.")
    target_kl: PositiveFloat | None = Field(
        None,
        description="End an update early, after the first optimizer step with a larger learner/update_kl (nats per "
        "action), which is then measured after each of them; null: never.",
    )
    kl_coef: float = Field(
        0.0, ge=0.0, description="Coefficient of the KL divergence from the initial policy; costs a forward pass."
    )
    kl_estimate: Literal["k3", "weighted_k3"] = Field(
        "k3",
        description="k3: as in GRPO; its gradient is biased. weighted_k3 (arXiv:2512.02556): times pi / pi_behaviour, "
        "with its gradient; value and gradient are then right for stale data as well.",
    )

    bc_coef: float = Field(
        0.0,
        ge=0.0,
        description="Coefficient of a cloning loss (nats per token) on demonstrations or on the run's own successes, "
        "against forgetting.",
    )
    bc_demos: tuple[str, ...] = Field(
        (),
        json_schema_extra=INPUT_PATH,
        description="Demonstrations to clone, as sft.demos names them; empty: the run's own successful episodes.",
    )
    bc_batch: Positive = Field(64, description="Chunks that each optimizer step clones in addition to its own.")
    bc_memory: Positive = Field(64, description="Successful episodes that are kept for cloning: the last ones.")

    @property
    def needs_recompute(self) -> bool:
        """Whether ``Algorithm.targets`` needs log-probabilities and values under the weights before the update."""
        return False

    @property
    def recomputes_proximal(self) -> bool:
        """Whether ratios are relative to these log-probabilities, and not to those of the policy that acted."""
        return self.needs_recompute

    @property
    def needs_features(self) -> bool:
        """Whether the learner needs what the value head reads of each state (``PolicyOutput.features``)."""
        return self.num_critics > 0

    @property
    def num_critics(self) -> int:
        """Members of the ensemble that rates chunks; 0: there is no critic."""
        return 0

    @property
    def loss_level(self) -> RatioLevel:
        """What one element of the policy's loss covers."""
        return "action"

    def entropy_coef_at(self, policy_version: int) -> float:
        """The entropy coefficient of an update."""
        left = 1.0 if self.entropy_decay is None else max(0.0, 1.0 - policy_version / self.entropy_decay)
        return left * self.entropy_coef

    def work(self, chunk_size: int) -> UpdateWork:
        reference = self.kl_coef > 0
        return UpdateWork(self.epochs, self.minibatches, self.needs_recompute + reference, reference)


class PolicyGradientConfig(AlgorithmConfig):
    """The objective of the ratios, and the importance weights of stale data."""

    objective: Literal["clip", "cispo", "sapo", "gipo"] = Field(
        "clip",
        description="What keeps probability ratios near 1. clip: a hard limit (PPO). cispo (arXiv:2506.13585): a "
        "limited weight, so that every element keeps its gradient. sapo (arXiv:2511.20347) and gipo "
        "(arXiv:2603.03955): weights that fade with the distance.",
    )
    tau_positive: PositiveFloat = Field(
        1.0, description="sapo: how fast gradients fade where the advantage is positive."
    )
    tau_negative: PositiveFloat = Field(1.05, description="sapo: how fast gradients fade where it is negative.")
    clip_low: PositiveFloat = Field(0.2, description="Ratios are clipped to [1 - clip_low, 1 + clip_high].")
    clip_high: PositiveFloat = Field(0.2, description="See clip_low.")
    gipo_sigma: PositiveFloat = Field(
        0.5, description="gipo: distance of a log-ratio from 0 at which its trust weight has fallen to 61 %."
    )
    dual_clip: float | None = Field(
        None, gt=1.0, description="clip: upper limit of ratios where the advantage is negative (arXiv:1912.09729)."
    )
    ratio_level: RatioLevel = Field("action", description="What one probability ratio covers.")
    ratio_mean: bool = Field(
        False,
        description="Take the geometric mean over the tokens that a ratio covers instead of their product. With "
        "ratio_level=chunk this is GSPO (arXiv:2507.18071).",
    )
    proximal: Literal["behaviour", "recomputed", "interpolated"] = Field(
        "behaviour",
        description="The policy that ratios are relative to. behaviour: the one that acted. The other two decouple it "
        "from the behaviour policy (arXiv:2505.24298). recomputed: the policy at the start of the update, by one more "
        "forward pass. interpolated: between the policy that acted and the one in training, by staleness.",
    )
    importance_level: WeightLevel | None = Field(
        None, description="What one weight pi_prox / pi_behaviour covers; ratio_level or coarser; null: ratio_level."
    )
    importance_cap: PositiveFloat | None = Field(None, description="Upper limit of the weights pi_prox / pi_behaviour.")
    importance_low: float | None = Field(
        None, gt=0.0, lt=1.0, description="Weights pi_prox / pi_behaviour below this count as 0; null: none does."
    )
    importance_high: float | None = Field(
        None, gt=1.0, description="Weights pi_prox / pi_behaviour above this count as 0; null: none does."
    )

    @model_validator(mode="after")
    def _limits_are_used(self) -> Self:
        if self.dual_clip is not None and self.objective != "clip":
            raise ValueError(
                f"dual_clip={self.dual_clip} limits ratios of objective=clip, {self.objective} has its own limit: "
                "set dual_clip=null, or objective=clip"
            )
        return self

    @model_validator(mode="after")
    def _weights_exist(self) -> Self:
        for name in ("importance_level", "importance_cap", "importance_low", "importance_high"):
            value = getattr(self, name)
            if value is not None and self.proximal == "behaviour":
                raise ValueError(
                    f"{name}={value} is about weights pi_prox / pi_behaviour, which are all 1 with proximal=behaviour: "
                    f"set proximal=recomputed, or {name}=null"
                )
        return self

    @model_validator(mode="after")
    def _weights_cover_whole_ratios(self) -> Self:
        if self.importance_level is not None:
            levels = get_args(WeightLevel)
            if levels.index(self.importance_level) < levels.index(self.ratio_level):
                raise ValueError(
                    f"importance_level={self.importance_level} is finer than ratio_level={self.ratio_level}: "
                    "one ratio has one weight; set it to the same or a coarser level"
                )
        if self.importance_level == "episode" and self.proximal == "interpolated":
            raise ValueError(
                "importance_level=episode needs all chunks of an episode at once, which proximal=interpolated never "
                "has: set proximal=recomputed, or importance_level=chunk"
            )
        return self

    @property
    def needs_recompute(self) -> bool:
        return self.recomputes_proximal or super().needs_recompute

    @property
    def recomputes_proximal(self) -> bool:
        return self.proximal == "recomputed"

    @property
    def takes_stale_data(self) -> bool:
        return self.proximal != "behaviour"

    @property
    def loss_level(self) -> RatioLevel:
        return self.ratio_level

    @property
    def weight_level(self) -> WeightLevel:
        """What one importance weight covers, in effect."""
        return self.importance_level or self.ratio_level

    @property
    def weight_cap(self) -> float | None:
        """Upper limit of the importance weights, in effect."""
        return self.importance_cap
