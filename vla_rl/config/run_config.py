"""All keys of a run: name, type, default and limits.

Values come from a YAML file and ``key=value`` overrides (``vla_rl.config.loading``) and do not change afterwards. Each
group of keys is one class: ``env`` in ``envs/*/config.py``, ``algo`` in ``algos/*.py``, ``policy`` in
``vla_rl/policies/*/config.py``, ``learner``, ``placement`` and ``world_model`` in files of their names here, the others
below. Reading a config loads no heavy library.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, Union, get_args

from pydantic import BaseModel, Field

from algos import AlgoConfig
from algos.ppo import PPOConfig
from envs import EnvConfig
from envs.base.config import DemosConfig
from envs.libero.config import LiberoConfig
from vla_rl.config.learner import LearnerConfig
from vla_rl.config.placement import PlacementConfig
from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.plugins import installed, is_reference, plugin_config
from vla_rl.core.schema import INPUT_PATH, ConfigGroup, Fraction, NonNegative, Positive, PositiveFloat, Threads
from vla_rl.policies import PolicyConfig
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig


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
