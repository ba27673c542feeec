"""Configuration keys of the world model."""

from typing import Literal

from pydantic import Field

from vla_rl.core.schema import ConfigGroup, NonNegative, Positive, PositiveFloat, Threads

ENCODER_ROWS = 64  # observations that the frozen policy encodes at a time


class WorldModelConfig(ConfigGroup):
    """A model of the simulator, trained along with the policy, which practises in it (docs/world_model.md)."""

    branches: int = Field(
        3,
        ge=2,
        description="Imagined chunks from the state of each new real one, which are compared. As long as the model "
        "passes its audit, a super-batch has these in addition to its real ones.",
    )
    warmup_episodes: NonNegative = Field(64, description="Real episodes of which the model learns before it is used.")
    members: int = Field(4, ge=2, description="Networks of the ensemble.")
    width: Positive = Field(96, description="Width of a network's hidden layers.")
    lr: PositiveFloat = Field(1e-3, description="Learning rate of AdamW.")
    weight_decay: float = Field(1e-2, ge=0.0, description="Weight decay of AdamW.")
    batch: Positive = Field(128, description="Chunks per optimizer step and network.")
    samples_per_chunk: Positive = Field(64, description="Chunks that each network learns from for each one played.")
    archive_episodes: Positive = Field(4096, description="Real episodes that are kept to learn from: the last ones.")
    disagreement: float = Field(
        0.0, ge=0.0, description="What is taken off an imagined return: this times the ensemble's standard deviation."
    )
    hindsight: float = Field(
        1.0, ge=0.0, description="Weight of learning where the robot was when the task was solved, as a side task."
    )
    placebo: bool = Field(
        False,
        description="A control for experiments: the model learns from each episode as if it had ended like the one "
        "before. Nothing can be gained from it but by chance.",
    )
    frozen: bool = Field(
        False,
        description="A control for experiments: the model learns once, from the episodes of the warm-up.",
    )
    audit_chunks: int = Field(512, ge=64, description="Newest audited chunks by which the model is judged.")
    audit_prior: float = Field(
        0.5, gt=0.0, le=1.0, description="Slope that the audit expects before it has seen anything; 1: a right model."
    )
    audit_prior_error: PositiveFloat = Field(
        0.5, description="Standard error of that expectation: the larger, the sooner measurements prevail."
    )
    audit_least: PositiveFloat = Field(
        0.15, description="The alarm: below this expected slope, nothing imagined is trained on."
    )
    max_scale: PositiveFloat = Field(
        2.0,
        description="Upper limit of the factor with which the audit corrects the size of imagined advantages.",
    )
    horizon: int = Field(
        1,
        ge=1,
        le=8,
        description="Chunks that are imagined in a row, at most; from 2 on, frames are predicted. A horizon is in use "
        "as long as its predictions on real episodes pass.",
    )
    horizon_gap: PositiveFloat = Field(
        0.5,
        description="A predicted observation passes if the difference that it makes to the initial policy's likely "
        "chunk is at most this share of the difference between the observations before and after.",
    )
    frame_model: Literal["composed", "diffusion"] = Field(
        "composed",
        description="How frames are predicted. composed: each pixel is taken from a frame that exists. diffusion: a "
        "transformer denoises patches.",
    )
    frame_width: Positive = Field(16, description="Channels of the composed frame model at half resolution.")
    diffusion_width: int = Field(
        96, ge=32, multiple_of=32, description="Width of the transformer that denoises frames."
    )
    diffusion_depth: Positive = Field(3, description="Its layers.")
    diffusion_patch: Positive = Field(8, description="Side of its patches, in pixels.")
    diffusion_steps: Positive = Field(4, description="Denoising steps of one prediction.")
    frame_lr: PositiveFloat = Field(2e-3, description="Learning rate of the frame model, with AdamW.")
    frame_batch: Positive = Field(32, description="Chunks per optimizer step of the frame model.")
    frame_samples_per_chunk: Positive = Field(
        16, description="Chunks that the frame model learns from for each one played."
    )
    frame_episodes: int = Field(
        128, ge=2, description="Real episodes whose frames are kept: the last ones. A checkpoint holds them."
    )
    threads: Threads = Field(1, description="CPU threads of the model's process.")
