"""All keys of a run: name, type, default and limits.

Values come from a YAML file and ``key=value`` overrides (``vla_rl.config.loading``) and do not change afterwards. Each
group of keys is one class: ``env`` in ``envs/*/config.py``, ``algo`` in ``algos/*.py``, ``policy`` in
``vla_rl/policies/*/config.py``, the others below. Reading a config loads no heavy library.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, Union, get_args

from pydantic import BaseModel, Field, model_validator

from algos import AlgoConfig
from algos.ppo import PPOConfig
from envs import EnvConfig
from envs.base.config import DemosConfig
from envs.libero.config import LiberoConfig
from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.plugins import installed, is_reference, plugin_config
from vla_rl.core.schema import INPUT_PATH, ConfigGroup, Fraction, NonNegative, Positive, PositiveFloat, Threads
from vla_rl.policies import PolicyConfig
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig

# DeepSpeed's defaults, in weights; what ZeRO holds at a time on top of a rank's own part
ZERO_BUCKET = 500_000_000  # whose gradients it reduces together
ZERO_LIVE = 1_000_000_000  # that stage 3 gathers
_MOST_HOSTS = 1000


class SftConfig(ConfigGroup):
    """The warm start: behaviour cloning of demonstrations (`vla-rl sft`)."""

    demos: tuple[str, ...] = Field(
        (),
        json_schema_extra=INPUT_PATH,
        description="Demonstrations: HDF5 files in LIBERO's layout, LeRobot data sets (v2, v3), hf://OWNER/NAME; "
        "empty: the scripted expert collects them.",
    )
    demo_episodes: Positive = Field(100, description="Episodes that the scripted expert plays.")
    demo_noise: Fraction = Field(0.2, description="Noise on the actions that the expert executes; labels have none.")
    updates: Positive = Field(2000, description="Optimizer steps.")
    batch: Positive = Field(64, description="Action chunks per optimizer step.")
    lr: PositiveFloat = Field(
        5e-4, description="Peak learning rate, after a linear warm-up over 5 % of the updates; then a cosine decay."
    )
    weight_decay: float = Field(0.01, ge=0.0, description="Weight decay of AdamW.")
    max_shift: NonNegative = Field(4, description="Augmentation: images are shifted by up to this many pixels.")
    bin_smoothing: float = Field(
        0.0, ge=0.0, description="Label smoothing: standard deviation, in bins, of the target distribution."
    )
    threads: Threads = Field(2, description="CPU threads.")
    start_from: str | None = Field(
        None,
        json_schema_extra=INPUT_PATH,
        description="Policy checkpoint to fine-tune, a folder or hf://OWNER/NAME; null: random weights.",
    )
    new_statistics: bool = Field(
        False,
        description="Scale actions and proprioception by the demonstrations' statistics instead of by start_from's. "
        "Random weights always get the demonstrations'.",
    )
    output: str = Field(
        "checkpoints/sft",
        description="Folder for the resulting policy checkpoint. If it exists, NAME-2 beside it is used, or the next "
        "free number.",
    )
    overwrite: bool = Field(False, description="Replace an existing checkpoint at output.")


class TrainConfig(ConfigGroup):
    """The main loop: data, staleness, evaluations and checkpoints."""

    iterations: Positive = Field(100, description="Learner updates of the whole run.")
    batch_episodes: Positive = Field(
        32, le=1_000_000, description="New episodes per super-batch, the data of one update."
    )
    reuse: Positive = Field(
        1,
        description="Updates that train on each episode, one after the other; super-batches grow as many times. Needs "
        "train.max_staleness of at least reuse - 1.",
    )
    task_sampling: Literal["in_turn", "by_failure"] = Field(
        "in_turn", description="in_turn: round-robin. by_failure: in proportion to the tasks' recent failure rates."
    )
    start_states: Literal["sampled", "benchmark"] = Field(
        "sampled",
        description="Where training episodes start. sampled: placements drawn by the simulator. benchmark: the "
        "benchmark's initial states, which evaluations use, too.",
    )
    max_staleness: NonNegative = Field(
        2,
        le=10_000,
        description="Maximum staleness, in policy updates: how many versions the weights that played a chunk may be "
        "older than the weights it trains. mode=sync uses 0. Off-policy algorithms drop nothing: it bounds how many "
        "episodes are started ahead of the learner.",
    )
    publish_every: Positive = Field(
        1, description="Updates between two weight syncs; evaluations get one, too. mode=sync uses 1."
    )
    eval_every: NonNegative = Field(10, description="Iterations between evaluations; 0: only at start and end.")
    eval_start: bool = Field(True, description="Also evaluate before the first update.")
    eval_episodes: NonNegative = Field(
        50, description="Episodes per evaluation, over the benchmark's initial states; 0: no evaluations."
    )
    eval_sampled: bool = Field(False, description="Evaluate a second time, with sampled instead of greedy actions.")
    checkpoint_every: Positive = Field(10, description="Iterations between checkpoints.")
    keep_checkpoints: Positive = Field(2, description="How many of the latest checkpoints to keep.")
    keep_best: bool = Field(
        True,
        description="Write a checkpoint after each evaluation with the highest greedy success so far, and keep it.",
    )
    patience: NonNegative = Field(
        0, description="Stop after this many evaluations in a row below the highest greedy success; 0: never."
    )
    restarts: NonNegative = Field(
        5,
        description="How often within an hour the run is restarted from its newest checkpoint after it has lost a "
        "learner or a node, or something took too long; one more failure ends it.",
    )
    max_minutes: PositiveFloat | None = Field(
        None,
        description="Time limit: evaluate, write a checkpoint and stop, after the first update at the earliest; null: "
        "none.",
    )


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


class EnvHostsConfig(ConfigGroup):
    """How many hosts only simulate (``placement.env_hosts``)."""

    min: NonNegative = Field(0, le=_MOST_HOSTS, description="With fewer than that, the run waits and begins no update.")
    max: NonNegative = Field(
        0,
        le=_MOST_HOSTS,
        description="The plan has places for so many; placement.env_workers is for all of them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_number(cls, given: Any) -> Any:
        if not isinstance(given, int) or isinstance(given, bool):
            return given
        if not 0 <= given <= _MOST_HOSTS:
            raise ValueError(f"{given} hosts: write a number of at least 0 and at most {_MOST_HOSTS}")
        return {"min": given, "max": given}

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}; give both, or one number for both")
        return self


def _or_a_number(schema: dict[str, Any]) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": _MOST_HOSTS}
    schema["anyOf"] = [number, {"$ref": schema.pop("$ref")}]


class PlacementConfig(ConfigGroup):
    """What runs where, how many processes of each kind there are, and how inference batches form.

    See docs/placement.md. A device is a GPU, or a CPU core on a machine without GPUs.
    """

    mode: Literal["auto", "collocated", "pipelined", "hybrid"] = Field(
        "auto",
        description="collocated: inference and learner share every device and take turns. pipelined: every device has "
        "one role. hybrid: the learner takes turns on all devices, the other roles divide them. auto: the best layout "
        "by the profile; without a profile collocated on one device, pipelined on several.",
    )
    nodes: Positive = Field(
        1,
        description="Machines of the Ray cluster for inference and learner; all must be like this one, which is the "
        "first.",
    )
    env_hosts: EnvHostsConfig = Field(
        EnvHostsConfig(),
        json_schema_extra=_or_a_number,
        description="Further machines of the Ray cluster, which only simulate: they have no inference server, and "
        "their env workers ask those of the others over the network. They may join and leave during a run. A number "
        "stands for both min and max.",
    )
    env_host_cores: Annotated[Positive, Field(le=4096)] | None = Field(
        None, description="Processor cores of each of these machines; null: as many as this one has."
    )
    env_host_compress: bool = Field(
        False,
        description="These machines compress what they send to inference (lz4, lossless): for slow links.",
    )
    ray_address: str | None = Field(
        None, description="A running Ray cluster: auto, or HOST:PORT; null: start Ray on this machine for the run."
    )
    devices: Positive | None = Field(None, description="Devices to use, over all nodes; null: all.")
    simulator_devices: Positive | None = Field(
        None, description="Devices of simulators, if they run on devices and roles divide these; null: an even share."
    )
    inference_devices: Positive | None = Field(
        None, description="Devices of inference, if roles divide the devices; null: an even share."
    )
    profile: str | None = Field(
        None,
        json_schema_extra=INPUT_PATH,
        description="Profile with measured costs (configs/profiles, `vla-rl profile`); the best layout is searched by "
        "it.",
    )
    replan_every: NonNegative = Field(
        0,
        description="Iterations between two searches for a better layout, by the costs measured since the last one. "
        "The run migrates if the gain is worth it. 0: never. Needs mode=auto.",
    )
    virtual: str | None = Field(
        None,
        json_schema_extra=INPUT_PATH,
        description="Profile of virtual devices: computing only holds a device for as long as the profile says. For "
        "benchmarks of the runtime; needs env=workload.",
    )
    time_scale: PositiveFloat = Field(
        1.0, description="Factor on the times of virtual devices: below 1 they are faster than the profile."
    )
    offload: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether inference and learner offload to host memory while the other one uses a shared device. "
        "auto: only if they do not fit together.",
    )
    env_workers: Positive = Field(
        2, le=10_000, description="Simulator processes over all nodes, if simulators run on cores."
    )
    envs_per_worker: Positive = Field(4, le=65_536, description="Environments of one simulator process.")
    stall_timeout_s: PositiveFloat = Field(
        60.0,
        description="A simulator or inference process that makes no progress for so many seconds is killed and "
        "replaced; after 20 times its longest recent call, if that is later.",
    )
    max_batch: Positive = Field(16, le=65_536, description="Maximum rows of one inference batch.")
    batch_sizes: tuple[Positive, ...] = Field(
        (),
        description="Sizes to which inference batches are padded with copies of a row, so that a GPU sees few shapes: "
        "the next larger one. Empty: batches stay as they are.",
    )
    compile_blocks: bool = Field(
        False,
        description="Inference servers compile each transformer block (torch.compile): fewer kernels a batch, after a "
        "minute at the first batches. Needs a C++ compiler, and triton on a GPU. Answers differ in the last digits.",
    )
    cuda_graphs: bool = Field(
        False,
        description="Inference servers record what a batch launches on the GPU, once for each size of batch, and "
        "replay it: faster where batches have few rows or the policy is small. batch_sizes keeps the sizes few.",
    )
    max_wait_ms: float = Field(
        5.0, ge=0.0, description="Maximum time that a request of an idle worker waits for its batch to fill."
    )
    inference_threads: Threads | None = Field(
        None, description="CPU threads of one inference server; null: one per core it has, 1 on a GPU."
    )

    def padded_rows(self, rows: int) -> int:
        """The size of an inference batch of that many rows by ``batch_sizes``."""
        return min((size for size in self.batch_sizes if size >= rows), default=rows)


class LogConfig(ConfigGroup):
    """What a run writes."""

    dir: str = Field("runs", description="Folder in which run folders are made.")
    name: str | None = Field(None, description="Name of the run folder; null: algorithm, simulator and time.")
    tensorboard: bool = Field(True, description="Write the metrics for TensorBoard.")
    wandb: Literal["off", "offline", "online"] = Field("off", description="Write the metrics for Weights & Biases.")
    wandb_project: str = Field("vla_rl", description="Project in Weights & Biases.")
    wandb_entity: str | None = Field(None, description="User or team in Weights & Biases; null: the account's default.")
    wandb_group: str | None = Field(None, description="Group of the run in Weights & Biases, such as its study.")
    wandb_tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        (), description="Tags of the run in Weights & Biases, of at most 64 characters each."
    )
    video: bool = Field(True, description="Save a short video of each evaluation.")
    dataset: str | None = Field(
        None,
        description="Folder of a LeRobot data set to which episodes are added, failures included, with every control "
        "step; rendering then costs policy.chunk_size times as much. null: none.",
    )
    dataset_episodes: Literal["all", "evaluations"] = Field("all", description="Which episodes log.dataset gets.")
    trace: bool = Field(False, description="Record what each process does when, for `vla-rl trace`.")
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="Port of http://127.0.0.1:PORT/metrics, where Prometheus finds the newest metrics as long as the "
        "run lasts; null: none.",
    )


class RunConfig(ConfigGroup):
    """One training run."""

    mode: Literal["async", "sync"] = Field(
        "async",
        description="async: rollouts and updates run at the same time. sync: they alternate, as the reference for "
        "comparisons.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="Seed of everything random.")
    env: EnvConfig = Field(default_factory=LiberoConfig)
    policy: PolicyConfig = Field(default_factory=OpenVLAOFTConfig)
    algo: AlgoConfig = Field(default_factory=PPOConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    demos: DemosConfig = Field(default_factory=DemosConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    world_model: WorldModelConfig | None = Field(None, description="null: no world model.")
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @classmethod
    def kinds(cls, group: str) -> dict[str, type[BaseModel]]:
        """The classes of a group by their name, those of other packages included once ``admit`` was called for them.

        Empty for a group of one kind.
        """
        info = cls.model_fields.get(group)
        if info is None or info.discriminator is None:
            return {}
        return {kind.model_fields["name"].default: kind for kind in get_args(info.annotation)}

    @classmethod
    def admit(cls, group: str, name: str) -> None:
        """Extend the schema of a group by a part of another package, if ``name`` is the name of one.

        Raises PluginError if the part cannot be used.
        """
        if name in cls.kinds(group) or not (is_reference(name) or name in installed(group)):
            return
        info = cls.model_fields[group]
        info.annotation = Union[(*get_args(info.annotation), plugin_config(group, name))]  # type: ignore[assignment]
        cls.model_rebuild(force=True)

    @property
    def max_staleness(self) -> int:
        """The bound on staleness in effect: ``train.max_staleness``, and the least possible with mode=sync."""
        return self.train.reuse - 1 if self.mode == "sync" else self.train.max_staleness

    @property
    def max_first_staleness(self) -> int:
        """The bound on staleness where an episode is first trained, so that it can be used ``train.reuse`` times."""
        return self.max_staleness - (self.train.reuse - 1)

    @property
    def publish_every(self) -> int:
        """Updates between two weight syncs in effect: ``train.publish_every``, and 1 with mode=sync."""
        return 1 if self.mode == "sync" else self.train.publish_every

    def input_paths(self) -> dict[str, str | tuple[str, ...]]:
        """The files and folders that the run reads, by dotted key."""
        return dict(_input_paths(self, ""))

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy with other values by dotted key, such as ``{"train.iterations": 3}``. Does not validate them.

        Raises KeyError for an unknown key.
        """
        config = self
        for key, value in values.items():
            config = _with_value(config, key.split("."), value, key)
        return config


def _input_paths(group: BaseModel, above: str) -> Iterator[tuple[str, str | tuple[str, ...]]]:
    for name, info in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            yield from _input_paths(value, f"{above}{name}.")
        elif info.json_schema_extra == INPUT_PATH and value:
            yield f"{above}{name}", value


def _with_value(group: Any, names: Sequence[str], value: Any, key: str) -> Any:
    name, *inner = names
    if name not in getattr(type(group), "model_fields", ()):
        raise KeyError(f"{key} is not a key of this config")
    if inner:
        value = _with_value(getattr(group, name), inner, value, key)
    return group.model_copy(update={name: value})
