"""Keys of what runs where."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from vla_rl.core.schema import INPUT_PATH, ConfigGroup, NonNegative, Positive, PositiveFloat, Threads

_MOST_HOSTS = 1000


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
