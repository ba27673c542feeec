"""The one schema of a run: every key, its type, its default and its limits.

Values come from a YAML file and ``key=value`` overrides (see ``config_loading``); nothing changes them afterwards.
Each group of keys is one class below; an algorithm's keys stand in its own file (``algos``). Heavy libraries are not
imported here: reading a config is instant.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from algos import AlgoConfig
from algos.ppo import PPO
from envs import EnvConfig
from envs.libero.config import LiberoConfig
from vla_rl.core.schema import Fraction, Group, NonNegative, Positive, PositiveFloat
from vla_rl.policies.openvla_oft.config import PolicyConfig

# --- sft: the warm start ---------------------------------------------------------------------------------------------


class SftConfig(Group):
    """Behaviour cloning of demonstrations, by `vla-rl sft`."""

    demos: tuple[str, ...] = Field((), description="HDF5 files in LIBERO's layout; empty: the scripted expert plays.")
    demo_episodes: Positive = Field(100, description="Demonstrations to collect where no files are given.")
    demo_noise: float = Field(0.2, ge=0.0, le=1.0, description="Noise on executed expert actions; labels stay clean.")
    updates: Positive = Field(2000, description="Optimizer steps.")
    batch: Positive = Field(64, description="Action chunks per step.")
    lr: PositiveFloat = Field(5e-4, description="Peak; rises linearly over 5 % of the updates, falls as a cosine.")
    weight_decay: float = Field(0.01, ge=0.0)
    max_shift: NonNegative = Field(4, description="Images are shifted by up to this many pixels, as augmentation.")
    bin_smoothing: float = Field(0.0, ge=0.0, description="Standard deviation, in bins, of the target distribution.")
    threads: Positive = 2
    output: str = Field("checkpoints/sft", description="Folder of the resulting checkpoint.")


# --- train, learner, placement, log ---------------------------------------------------------------------------------


class TrainConfig(Group):
    """The outer loop."""

    iterations: Positive = Field(100, description="Learner updates.")
    batch_episodes: Positive = Field(32, description="Episodes in one super-batch.")
    task_sampling: Literal["in_turn", "by_failure"] = Field(
        "in_turn", description="by_failure: tasks are drawn in proportion to their recent failure rates."
    )
    start_states: Literal["sampled", "benchmark"] = Field(
        "sampled",
        description="Where training episodes start: as the simulator samples, or from the benchmark's initial states, "
        "which evaluations start from too.",
    )
    max_age: NonNegative = Field(2, description="Updates that a chunk's weights may lie behind the weights it trains.")
    publish_every: Positive = Field(
        1, description="Updates between hand-overs of weights; also before evaluations. With mode=sync every one."
    )
    eval_every: NonNegative = Field(10, description="Iterations between evaluations; 0: at start and end only.")
    eval_start: bool = Field(True, description="Evaluate before the first update, too.")
    eval_episodes: NonNegative = Field(50, description="Per evaluation, over the benchmark's initial states; 0: never.")
    eval_sampled: bool = Field(False, description="Also evaluate with sampled actions.")
    checkpoint_every: Positive = Field(10, description="Iterations between checkpoints.")
    keep_checkpoints: Positive = 2
    max_minutes: PositiveFloat | None = Field(
        None, description="Evaluate, write a checkpoint and stop after this time, but not before the first update."
    )


class LearnerConfig(Group):
    """DeepSpeed."""

    ranks: Positive | None = Field(None, description="Data-parallel processes; null: one a GPU it has, else 1.")
    zero_stage: int = Field(0, ge=0, le=3)
    precision: Literal["fp32", "bf16"] = "fp32"
    micro_batch: Positive = Field(64, description="Chunks per forward and backward pass, on one rank.")
    lr: float = Field(1e-5, ge=0.0, description="Fits training all weights; RL4VLA takes 1e-4 with LoRA.")
    value_lr: float | None = Field(None, ge=0.0, description="Of the value head; null: lr.")
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0.0)
    warmup_iterations: NonNegative = Field(0, description="Iterations over which lr rises linearly.")
    max_grad_norm: PositiveFloat = 1.0
    threads: Positive | None = Field(None, description="CPU threads of one rank; null: one a core it has.")
    latency_ms: float = Field(0.0, ge=0.0, description="Simulated extra cost of one update, slept.")


class PlacementConfig(Group):
    """What runs where, how many processes of each kind, and how they are fed (``vla_rl.placement.plan``)."""

    mode: Literal["auto", "collocated", "pipelined", "hybrid"] = Field(
        "auto",
        description="collocated: inference and learner take turns on every device (a GPU, or a core where there is no "
        "GPU). pipelined: every device has one role. hybrid: the learner takes turns on all, the others divide them.",
    )
    nodes: Positive = Field(
        1, description="Machines of the Ray cluster at ray_address to use, all like this one, which is the first."
    )
    ray_address: str | None = Field(
        None, description="Of a running Ray cluster: auto, or HOST:PORT; null: one of the run's own, on this machine."
    )
    devices: Positive | None = Field(None, description="How many devices to use, of all nodes; null: all.")
    simulator_devices: Positive | None = Field(None, description="Of a split, for simulators that run on devices.")
    inference_devices: Positive | None = Field(None, description="Of a split, for inference; null: an even share.")
    profile: str | None = Field(
        None,
        description="What things cost (configs/profiles, `vla-rl profile`); by it the best layout is searched for.",
    )
    replan_every: NonNegative = Field(
        0,
        description="Iterations between two looks for a better layout, by what the run has measured of its costs since "
        "the last one; where it is worth it, the run moves. 0: never. Needs mode=auto.",
    )
    virtual: str | None = Field(
        None,
        description="A profile (configs/profiles): devices are virtual, computing is holding one for as long as the "
        "profile says. For benchmarks of the runtime; needs env=workload.",
    )
    time_scale: PositiveFloat = Field(1.0, description="Of virtual devices: below 1 they are faster than the profile.")
    offload: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether inference and learner leave the devices that they share to each other. auto: where they "
        "do not fit together, by the profile; without a profile no.",
    )
    env_workers: Positive = Field(2, description="Simulator processes of all nodes, where simulators run on cores.")
    slots_per_worker: Positive = Field(4, description="Episodes that one simulator process holds at once.")
    max_batch: Positive = Field(16, description="Most rows of one inference batch.")
    max_wait_ms: float = Field(5.0, ge=0.0, description="An inference batch fires when its oldest request is this old.")
    inference_threads: Positive | None = Field(None, description="CPU threads of a server; null: one a core it has.")


class LogConfig(Group):
    """What a run leaves behind."""

    dir: str = Field("runs", description="Folder of run folders.")
    name: str | None = Field(None, description="Name of the run folder; null: algorithm, simulator and time.")
    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "vla_rl"
    video: bool = Field(True, description="Save a short video of each evaluation.")


class RunConfig(Group):
    """One training run."""

    mode: Literal["async", "sync"] = Field("async", description="sync: rollout, then update, in turns; the reference.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    env: EnvConfig = Field(default_factory=LiberoConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    algo: AlgoConfig = Field(default_factory=PPO)
    sft: SftConfig = Field(default_factory=SftConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    log: LogConfig = Field(default_factory=LogConfig)
