"""Off-policy control: a critic rates chunks, and an actor follows it.

    aim = r + γ^n · V(s')        n executed steps, of one or more chunks; r: their discounted rewards; 0 after the end
    L_Q = mean (Q(s, a) − aim)²
    L_π : each algorithm's own

Actors with continuous actions follow the critic's gradient (``GradientAlgorithm``):

    V(s') = min Q_target(s', a')           a': ``chunks_after``
    L_Q   has also cql_coef · (log mean exp Q(s, other) − Q(s, a))
    L_π   has also the squared excess of its means over the simulator's limits

Data come from a replay memory (``vla_rl.replay.memory``), so that an episode serves many updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from algos.config import AlgoConfigBase, UpdateWork
from vla_rl.core.errors import UserError
from vla_rl.core.records import BootstrapRule, EnvSpec
from vla_rl.core.schema import INPUT_PATH, Fraction, NonNegative, Positive, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

# Sizes of the critic's parts. The planner reads them: it does not build the critic.
TASK_WIDTH = 16  # of a task's embedding
CAMERA_WIDTH, CHANNELS = 128, 64  # of its own encoder: numbers for each camera, channels of a patch

# What a policy must have: most likely actions with a gradient, or also a deviation with one (``PolicyOutput``); or a
# network that chooses its noise.
ActorNeeds = Literal["nothing", "means", "deviations", "steering"]


@dataclass(frozen=True, slots=True)
class EntropyRule:
    """How much the entropy of the actor counts.

    Attributes:
        alpha: its coefficient; where ``target`` is set, the first one.
        target: nats of an action number that the coefficient is tuned to; None: it stays.
        lr: learning rate of its logarithm (Adam).
    """

    alpha: float = 0.0
    target: float | None = None
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class Acted:
    """What the actor does in n states, with gradients, and what was executed there instead."""

    q: Tensor  # [n], rating of its chunks
    means: Tensor  # [n, K, A], normalized
    entropy: Tensor  # [n, K, A], nats
    recorded: Tensor  # [n, K, A], normalized, without gradient
    executed: Tensor  # bool [n, K]


class OffPolicyConfig(AlgoConfigBase):
    """Replay memory, critic, and how often both are used."""

    one_rank: ClassVar[bool] = True
    remembers: ClassVar[bool] = True
    actor_needs: ClassVar[ActorNeeds] = "means"
    rates_states: ClassVar[bool] = False  # whether the critic also has values of states

    gamma: Fraction = Field(0.99, description="Discount per control step.")
    bootstrap: BootstrapRule = Field(
        "truncated",
        description="Which episodes end with the value of their final observation. truncated: those that the time "
        "limit ended. never: none, where the time limit is part of the task.",
    )
    return_chunks: Positive = Field(
        1,
        description="Chunks whose rewards an aim sums up before the critic's own rating follows. More bring a success "
        "to earlier states in fewer steps; that other chunks were chosen than the policy's now is not corrected.",
    )
    updates_per_step: PositiveFloat = Field(
        0.15, description="The critic's optimizer steps for each control step of new episodes."
    )
    batch: Positive = Field(256, description="Chunks of one of these steps.")
    micro_batch: Positive | None = Field(
        None,
        description="Chunks that pass the policy at a time; null: the batch. Fewer take less memory for the same "
        "gradient. A step of the actor then passes its batch twice.",
    )
    memory_gib: PositiveFloat = Field(4.0, description="Size of the replay memory; the oldest episodes are forgotten.")
    critic_successes: Fraction | None = Field(
        0.5, description="Share of the critic's chunks from successful episodes; null: whatever it is in the memory."
    )
    actor_successes: Fraction | None = Field(0.9, description="The same of the actor's chunks.")
    tasks_evenly: bool = Field(
        False,
        description="Whether each task has the same share of what is drawn from the memory, among successes and among "
        "others; false: as many chunks as the memory holds of it.",
    )
    half_life: Positive | None = Field(
        None,
        description="Newer episodes after which one is drawn half as often; null: its age does not count.",
    )
    shift: NonNegative = Field(4, description="Pixels by which images are shifted at random (arXiv:2107.09645).")
    demos: tuple[str, ...] = Field(
        (),
        json_schema_extra=INPUT_PATH,
        description="Demonstrations to train on as well, as sft.demos names them. They are taken for successes that "
        "end with a reward of 1.",
    )
    demo_share: Fraction = Field(
        0.5, description="Share of each batch from demonstrations, if there are any (RLPD, arXiv:2302.02948)."
    )
    critic_reads: Literal["images", "features", "state"] = Field(
        "images",
        description="images: the critic has an encoder of its own. features: it reads the policy's, which costs "
        "nothing where the policy is large. state: it reads the simulator's state, which no robot has.",
    )
    critic_loss: Literal["squares", "hl_gauss"] = Field(
        "squares",
        description="squares: a rating is a number, trained by squared errors. hl_gauss (arXiv:2403.03950): it is the "
        "mean of a distribution over bins, trained by cross-entropy.",
    )
    q_min: float = Field(-0.1, description="hl_gauss: the lowest rating; aims below it are taken for it.")
    q_max: float = Field(1.1, description="hl_gauss: the highest rating. 1.1 suits rewards of 1 for a success.")
    q_bins: int = Field(51, ge=2, description="hl_gauss: number of bins between these.")
    critic_width: Positive = Field(256, description="Width of the critic's two layers.")
    critics: Positive = Field(4, description="Members of the critic's ensemble.")
    critic_lr: PositiveFloat = Field(3e-4, description="The critic's learning rate (Adam).")
    critic_warmup: NonNegative = Field(1500, description="First steps, in which only the critic is trained.")
    imagined_coef: float = Field(
        1.0,
        ge=0.0,
        description="Coefficient of the critic's loss on what a world model imagines (world_model={}): chunks of one "
        "state, and how much more it expects of each than of their mean.",
    )
    target_rate: Fraction = Field(
        0.01, description="How far Q_target moves towards Q in each step; in the critic's warm-up they are equal."
    )
    actor_every: Positive = Field(4, description="Steps of the critic for one of the actor.")

    def work(self, chunk_size: int) -> UpdateWork:
        rated = self.updates_per_step * chunk_size * self.batch
        passes = rated / self.actor_every
        at_once = min(self.batch, self.micro_batch or self.batch)
        return UpdateWork(
            epochs=passes,
            minibatches=1,
            extra_passes=1 + (passes if at_once < self.batch else 0),  # new chunks are rated once
            reference=False,
            step_rows=self.batch,
            pass_rows=at_once,
            critic_rows=rated,
            critic_passes=self.critic_passes,
        )

    @property
    def critic_passes(self) -> int:
        """Passes of the policy in a step of the critic: with its features, in the states before and after a chunk."""
        return 2 if self.critic_reads == "features" else 0

    @property
    def rating_outputs(self) -> int:
        """Numbers that a member of the critic gives for one rating."""
        return self.q_bins if self.critic_loss == "hl_gauss" else 1

    def chunk_discount(self, chunk_size: int) -> float:
        return self.gamma**chunk_size

    @property
    def bootstrap_rule(self) -> BootstrapRule:
        return self.bootstrap

    @property
    def reads_state(self) -> bool:
        return self.critic_reads == "state"

    def check_simulator(self, spec: EnvSpec) -> None:
        if self.reads_state and not spec.state_dim:
            raise UserError(
                f"algo.critic_reads=state, and env.name={spec.name} does not give its state: use images or features"
            )

    @model_validator(mode="after")
    def _bins_hold_no_rating(self) -> Self:
        if not self.q_min < 0 < self.q_max:
            raise ValueError(f"ratings begin at 0, which q_min={self.q_min} and q_max={self.q_max} must enclose")
        return self


class OffPolicyAlgorithm(ABC):
    """An algorithm and its configuration. Stateless."""

    Config: ClassVar[type[OffPolicyConfig]]
    config: OffPolicyConfig

    def __init__(self, config: OffPolicyConfig) -> None:
        self.config = config


class GradientConfig(OffPolicyConfig):
    """Keys of algorithms whose actors follow the critic's gradient."""

    critic_subset: Positive | None = Field(
        None, description="Members, drawn at random, whose minimum is the aim (REDQ, arXiv:2101.05982); null: all."
    )
    cql_coef: float = Field(0.0, ge=0.0, description="Coefficient of the conservative term (CQL, arXiv:2006.04779).")
    cql_actions: Positive = Field(4, description="Random chunks, and as many near the actor's, in that term.")

    @property
    def critic_passes(self) -> int:
        """The aim needs the policy in the state after a chunk, the conservative term also in the one before."""
        return max(super().critic_passes, 2 if self.cql_coef else 1)


class GradientAlgorithm(OffPolicyAlgorithm):
    """Its actor follows the critic's gradient, through chunks that depend on what the policy states.

    How a chunk is drawn is each algorithm's own: of ``means`` [n, K, A], normalized, of ``deviations``, likewise (None
    where the policy has none), and of ``noise``, standard normal numbers of that shape.
    """

    Config: ClassVar[type[GradientConfig]]
    config: GradientConfig

    @property
    def entropy_rule(self) -> EntropyRule:
        """How much the entropy counts in ``actor_loss`` and ``values_after``."""
        return EntropyRule()

    @abstractmethod
    def chunks(self, means: Tensor, deviations: Tensor | None, noise: Tensor) -> Tensor:
        """[n, K, A], with gradients: what the actor's step rates."""

    @abstractmethod
    def chunks_near(self, means: Tensor, deviations: Tensor | None, noise: Tensor) -> Tensor:
        """[n, K, A]: what the conservative term compares executed chunks with, beside chunks at random."""

    @abstractmethod
    def chunks_after(self, means: Tensor, deviations: Tensor | None, noise: Tensor) -> Tensor:
        """[n, K, A]: what the aim rates, in the states after the executed steps."""

    def values_after(self, rated: Tensor, entropy: Tensor, alpha: float) -> Tensor:
        """[n, members]: the values that the aim is of; ``rated`` like it, ``entropy`` [n, K, A]."""
        return rated

    def critic_loss(self, td: Tensor, q: Tensor, other: Tensor | None) -> Tensor:
        """Mean over n chunks, summed over the ensemble.

        Args:
            td: the loss of the recorded chunks towards their aims, a scalar.
            q: [n, members], of the recorded chunks.
            other: [n, chunks, members], of other chunks in the same states; None without the conservative term.
        """
        from algos import td_losses  # loads torch

        return td if other is None else td + self.config.cql_coef * td_losses.conservative_loss(q, other)

    @abstractmethod
    def actor_loss(self, acted: Acted, alpha: float) -> Tensor:
        """The actor's loss, a scalar; ``alpha``: the entropy's coefficient now."""
