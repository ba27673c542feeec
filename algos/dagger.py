"""DAgger (Ross et al. 2011, arXiv:1011.0686): clone what an expert does in the states that the policy leads to.

    expert and policy take turns, chunk by chunk          vla_rl.rollout.teacher
    L = − mean log π(expert's chunk | s)                  by token, over this super-batch's chunks
        − bc_coef · the same mean                         over earlier ones and demonstrations

The simulator's scripted expert stands for the person who corrects a robot. No reward is read. Reinforcement learning is
compared with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from algos.algorithm import Algorithm
from algos.config import AlgorithmConfig, RatioLevel
from algos.targets import Targets
from vla_rl.core.records import EXPERT_STEPS, Array, SuperBatch, TeacherRule
from vla_rl.core.schema import INPUT_PATH, Fraction, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from algos.targets import RowTargets


class DAggerConfig(AlgorithmConfig):
    """Cloning of an expert that takes over now and then. ``bc_coef`` clones its earlier chunks as well."""

    name: Literal["dagger"] = "dagger"
    expert_share: Fraction = Field(0.5, description="Share of the training chunks that the expert plays, at the start.")
    expert_decay: Positive | None = Field(
        None, description="Iterations over which expert_share falls to 0, linearly; null: it stays."
    )
    epochs: Positive = Field(8, description="Passes over a super-batch.")
    bc_coef: float = Field(
        1.0, ge=0.0, description="Coefficient of the cloning loss (nats per token) on the expert's earlier chunks."
    )
    bc_memory: Positive = Field(1000, description="Episodes whose expert's chunks are kept for that: the last ones.")
    bc_demos: tuple[str, ...] = Field(
        (),
        json_schema_extra=INPUT_PATH,
        description="Demonstrations that are cloned as often as earlier chunks, as sft.demos names them.",
    )

    @property
    def loss_level(self) -> RatioLevel:
        """As the cloning loss, so that new and earlier chunks weigh the same."""
        return "token"

    @property
    def teacher(self) -> TeacherRule | None:
        return TeacherRule(self.expert_share, self.expert_decay)

    @model_validator(mode="after")
    def _nothing_measures_the_divergence(self) -> Self:
        if self.target_kl is not None:
            raise ValueError(
                f"target_kl={self.target_kl}: the KL divergence of an update is estimated on chunks that the policy "
                "has drawn, and dagger trains on the expert's alone; leave it at null, and lower learner.lr instead"
            )
        return self


class DAgger(Algorithm):
    """Maximizes the log-probability of the expert's chunks."""

    Config = DAggerConfig
    config: DAggerConfig

    def compute_advantages(
        self, batch: SuperBatch, proximal: Array, values: Array, q: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns 1 for the expert's chunks and 0 for the policy's own in place of advantages."""
        return by_expert(batch).astype(np.float64), np.zeros(batch.num_chunks)

    def trained_chunks(self, targets: Targets) -> Array:
        return np.flatnonzero(targets.advantages)

    def kept_chunks(self, batch: SuperBatch) -> Array:
        return by_expert(batch)

    def policy_loss(self, logprobs: Tensor, rows: RowTargets, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from algos.cloning import weighted_cloning  # loads torch

        nothing = rows.advantages < 0  # recorded log-probabilities are of the chunk that the expert replaced
        return weighted_cloning(logprobs, rows, tokens, rows.advantages, compared=nothing)


def by_expert(batch: SuperBatch) -> Array:
    """bool [M]: which chunks the expert played."""
    return batch.record[EXPERT_STEPS] > 0
