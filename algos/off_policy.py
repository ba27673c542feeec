"""Off-policy control: a critic rates chunks, and an actor with continuous actions follows it.

    aim = r + γ^n · min Q_target(s', π(s') + noise)      n executed steps; r: their discounted rewards; 0 after the end
    L_Q = mean (Q(s, a) − aim)² + cql_coef · (log mean exp Q(s, other) − Q(s, a))
    L_π : each algorithm's own (``actor_loss``)

Data come from a replay memory (``vla_rl.replay.memory``), so that an episode serves many updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from algos.config import AlgoConfigBase, UpdateWork
from vla_rl.core.errors import UserError
from vla_rl.core.records import BootstrapRule, EnvSpec
from vla_rl.core.schema import INPUT_PATH, Fraction, NonNegative, Positive, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor

# Sizes of the critic's parts: the planner, which does not build it, reads them, too
TASK_WIDTH = 16  # of a task's embedding
CAMERA_WIDTH, CHANNELS = 128, 64  # of its own encoder: numbers for each camera, channels of a patch


class OffPolicyConfig(AlgoConfigBase):
    """Replay memory, critic, and how often both are used."""

    one_rank: ClassVar[bool] = True

    gamma: Fraction = Field(0.99, description="Discount per control step.")
    bootstrap: BootstrapRule = Field(
        "truncated",
        description="Which episodes end with the value of their final observation. truncated: those that the time "
        "limit ended. never: none, where the time limit is part of the task.",
    )
    updates_per_step: PositiveFloat = Field(
        0.15, description="The critic's optimizer steps for each control step of new episodes."
    )
    batch: Positive = Field(256, description="Chunks of one of these steps.")
    memory_gib: PositiveFloat = Field(4.0, description="Size of the replay memory; the oldest episodes are forgotten.")
    critic_successes: Fraction | None = Field(
        0.5, description="Share of the critic's chunks from successful episodes; null: whatever it is in the memory."
    )
    actor_successes: Fraction | None = Field(0.9, description="The same of the actor's chunks.")
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
    critic_width: Positive = Field(256, description="Width of the critic's two layers.")
    critics: Positive = Field(4, description="Members of the critic's ensemble.")
    critic_subset: Positive | None = Field(
        None, description="Members, drawn at random, whose minimum is the aim (REDQ, arXiv:2101.05982); null: all."
    )
    critic_lr: PositiveFloat = Field(3e-4, description="The critic's learning rate (Adam).")
    critic_warmup: NonNegative = Field(1500, description="First steps, in which only the critic is trained.")
    target_rate: Fraction = Field(
        0.01, description="How far Q_target moves towards Q in each step; in the critic's warm-up they are equal."
    )
    target_noise: float = Field(0.1, ge=0.0, description="Deviation of the noise on the actions after a chunk (TD3).")
    target_clip: PositiveFloat = Field(0.3, description="Limit of that noise.")
    cql_coef: float = Field(0.0, ge=0.0, description="Coefficient of the conservative term (CQL, arXiv:2006.04779).")
    cql_actions: Positive = Field(4, description="Random chunks, and as many near the actor's, in that term.")
    actor_every: Positive = Field(4, description="Steps of the critic for one of the actor.")

    def work(self, chunk_size: int) -> UpdateWork:
        """The policy's passes alone, which are most of it where the policy is large.

        The critic's step needs the policy in the next state, and in the state before where it reads features there or
        rates the actor's chunks. New chunks are rated once.
        """
        rated = self.updates_per_step * chunk_size * self.batch  # chunks of the critic's steps
        states = 2 if self.rates_before else 1
        passes = max(1, round(rated / self.actor_every))
        extra = round(states * rated) + 1
        return UpdateWork(epochs=passes, minibatches=1, extra_passes=extra, reference=False, step_rows=self.batch)

    @property
    def rates_before(self) -> bool:
        """Whether the critic's step needs the policy's output in the state before a chunk."""
        return self.critic_reads == "features" or self.cql_coef > 0

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
    def _demonstrations_have_no_state(self) -> Self:
        if self.demos and self.reads_state:
            raise ValueError("critic_reads=state: demonstrations have no such state; use critic_reads=features")
        return self


class OffPolicyAlgorithm(ABC):
    """An algorithm and its configuration. Stateless."""

    Config: ClassVar[type[OffPolicyConfig]]
    config: OffPolicyConfig

    def __init__(self, config: OffPolicyConfig) -> None:
        self.config = config

    def critic_loss(self, q: Tensor, aim: Tensor, other: Tensor | None) -> Tensor:
        """Mean over n chunks, summed over the ensemble.

        Args:
            q: [n, members], of the recorded chunks.
            aim: [n], without gradient.
            other: [n, chunks, members], of other chunks in the same states; None without the conservative term.
        """
        from algos import td_losses  # loads torch

        loss = td_losses.td_loss(q, aim)
        return loss if other is None else loss + self.config.cql_coef * td_losses.conservative_loss(q, other)

    @abstractmethod
    def actor_loss(self, q: Tensor, actions: Tensor, recorded: Tensor, executed: Tensor) -> Tensor:
        """The actor's loss, a scalar.

        Args:
            q: [n], rating of the actor's chunks.
            actions: [n, K, A], the actor's, normalized, with gradients.
            recorded: [n, K, A], what was executed instead.
            executed: bool [n, K].
        """
