"""Configuration keys that all policies share, and what the rest of the system asks a policy's configuration."""

from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import Field

from vla_rl.core.records import EnvSpec, PolicySpec
from vla_rl.core.schema import INPUT_PATH, ConfigGroup, Positive, PositiveFloat


class PolicyConfigBase(ConfigGroup):
    """What every policy has. Each derives its own configuration from this, with its ``name``."""

    merged: ClassVar[dict[str, Any]] = {}  # values of keys with which a checkpoint that a run wrote is loaded
    elsewhere: ClassVar[bool] = False  # whether its weights are on another machine, so that there is no checkpoint
    has_blocks: ClassVar[bool] = True  # which can be computed again, or compiled, one by one

    name: str

    checkpoint: str | None = Field(
        None,
        json_schema_extra=INPUT_PATH,
        description="Folder of a policy checkpoint to start from, or hf://OWNER/NAME; null: random weights.",
    )
    chunk_size: Positive = Field(8, description="Actions that one inference predicts, in control steps.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; log-probabilities use it, too.")
    temperature_end: PositiveFloat | None = Field(
        None, description="Temperature from iteration temperature_iterations on; null: the same as at the start."
    )
    temperature_iterations: Positive = Field(
        100, description="Iterations over which the temperature changes to temperature_end, linearly."
    )
    detach_value: bool = Field(
        True, description="Stop the value loss's gradients at the value head, so that they do not change the trunk."
    )
    value_time: bool = Field(
        True,
        description="The value head reads which share of the time limit has passed (arXiv:1712.00378); false: it does "
        "not.",
    )
    latency_ms: float = Field(0.0, ge=0.0, description="Simulated extra time of one inference batch (a sleep).")

    @abstractmethod
    def spec(self, env: EnvSpec) -> PolicySpec:
        """What the policy exchanges with the rest of the system."""

    @property
    def trainable(self) -> bool:
        """Whether it has log-probabilities and losses; else it can be evaluated only."""
        return True

    @property
    def origin(self) -> str:
        """Where its weights come from, for reports."""
        return self.checkpoint or "random weights"

    @property
    def size_name(self) -> str:
        """The name of the architecture, for reports."""
        return self.name

    @property
    def regresses(self) -> bool:
        """Whether it has most likely actions with a gradient (``PolicyOutput.means``)."""
        return False

    @property
    def draws_normal(self) -> bool:
        """Whether it draws from normal distributions around them (``PolicyOutput.deviations``)."""
        return False

    @property
    def steered(self) -> bool:
        """Whether a network chooses its noise, which is then the action of off-policy learning, and all that is trained
        (``vla_rl.policies.base.steering``)."""
        return False

    @property
    def discrete(self) -> bool:
        """Whether actions are bins, which cloning can smooth."""
        return True

    @property
    def freezes_weights(self) -> bool:
        """Whether some weights are never trained, so that processes can share them."""
        return False

    @property
    def memory_remedy(self) -> str:
        """What errors about too little memory propose: how to train fewer weights. Empty if the run does so already, or
        cannot."""
        return ""

    @property
    def own_weights_key(self) -> str | None:
        """The key by which inference changes frozen weights (``Policy.prepare_to_act``); None: it does not.

        It then cannot share them with the learner, and keeps the original ones in main memory.
        """
        return None

    @property
    def holds_reference(self) -> bool:
        """Whether the trained policy can act as before training (``Policy.has_reference``), so that none is copied."""
        return self.freezes_weights

    def temperature_at(self, policy_version: int) -> float:
        """Temperature at which a version of the weights is sampled and trained."""
        end = self.temperature if self.temperature_end is None else self.temperature_end
        done = min(1.0, policy_version / self.temperature_iterations)
        return self.temperature + done * (end - self.temperature)
