"""Keys of the optimizer and its processes."""

import math
from typing import Annotated, Literal

from pydantic import Field

from vla_rl.core.schema import ConfigGroup, Fraction, NonNegative, Positive, PositiveFloat, Threads

# DeepSpeed's defaults, in weights; what ZeRO holds at a time on top of a rank's own part
ZERO_BUCKET = 500_000_000  # whose gradients it reduces together
ZERO_LIVE = 1_000_000_000  # that stage 3 gathers


class LearnerConfig(ConfigGroup):
    """The optimizer and its processes (DeepSpeed)."""

    ranks: Positive | None = Field(
        None, description="Data-parallel processes; null: one per GPU of the learner, or one per node without GPUs."
    )
    zero_stage: int = Field(0, ge=0, le=3, description="DeepSpeed's ZeRO stage: what is sharded over the ranks.")
    offload_optimizer: Literal["none", "cpu"] = Field(
        "none",
        description="cpu: optimizer state and master weights stay in host memory, where the optimizer steps "
        "(DeepSpeed's ZeRO-Offload). Needs zero_stage of at least 1.",
    )
    offload_parameters: Literal["none", "cpu"] = Field(
        "none",
        description="cpu: weights stay in host memory, and come to the device block by block (DeepSpeed's "
        "ZeRO-Infinity). Needs zero_stage=3.",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Dtype of the weights, in inference as well. With bf16, gradients are accumulated in fp32, and the "
        "optimizer has master weights in fp32.",
    )
    matmul: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="How matrices in fp32 are multiplied, in inference as well. bf16: their factors are rounded to "
        "bfloat16, sums stay in fp32; for GPUs, and processors with AMX.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Keep only the inputs of blocks for the backward pass and compute the rest again: far less memory "
        "for a third more computing (arXiv:1604.06174).",
    )
    compile_blocks: bool = Field(
        False,
        description="Compile each transformer block for training (torch.compile): fewer kernels a micro-batch, after a "
        "minute or two at the first ones. Needs a C++ compiler, and triton on a GPU. Gradients differ in the last "
        "digits. Not with zero_stage=3.",
    )
    micro_batch: Positive = Field(64, description="Chunks per forward and backward pass of one rank.")
    lr: float = Field(1e-5, ge=0.0, description="Learning rate; fits training all weights (RL4VLA: 1e-4 with LoRA).")
    value_lr: float | None = Field(None, ge=0.0, description="Learning rate of the value head; null: the same as lr.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="Betas of AdamW, both below 1.")
    weight_decay: float = Field(0.0, ge=0.0, description="Weight decay of AdamW.")
    warmup_iterations: NonNegative = Field(
        0,
        description="Iterations over which the policy's learning rate rises linearly, from its first update on. The "
        "value head has no warm-up.",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="How the learning rates of policy and value head change after the warm-up; linear and cosine fall "
        "to 0 at the end. Those of critics (critic_lr) stay.",
    )
    max_grad_norm: PositiveFloat = Field(
        1.0,
        description="The gradient of the policy, and that of the value head, are each clipped to this norm.",
    )
    ema: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None,
        description="Keep averaged weights: a mean of those after each update, in which each counts so much times the "
        "next newer one. Evaluations and the policy in a checkpoint are then the average; training episodes are played "
        "by the weights themselves. Such as 0.9. null: no average.",
    )
    max_skipped_updates: Positive = Field(
        3,
        description="Updates in a row with gradients that are not finite that end the run. Their optimizer steps are "
        "skipped, and their data is kept for inspection.",
    )
    threads: Threads | None = Field(None, description="CPU threads of one rank; null: one per core it has, 1 on a GPU.")
    latency_ms: float = Field(0.0, ge=0.0, description="Simulated extra time of one update (a sleep).")

    def policy_lr_factor(self, policy_version: int, first: int, iterations: int) -> float:
        """What the policy's learning rate is multiplied by in an update, of ``iterations`` in all, after a warm-up.

        ``first``: the first version whose update trains the policy; 0 before.
        """
        update = policy_version - first
        if update < self.warmup_iterations:
            return max(0, update + 1) / (self.warmup_iterations + 1)
        return self.schedule_factor(policy_version, first + self.warmup_iterations, iterations)

    def schedule_factor(self, policy_version: int, first: int, iterations: int) -> float:
        """What ``lr_schedule`` multiplies a learning rate by, falling from the update of version ``first`` on."""
        done = (policy_version - first) / max(1, iterations - first)
        match self.lr_schedule:
            case "linear":
                return 1.0 - done
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * done))
            case "constant":
                return 1.0
