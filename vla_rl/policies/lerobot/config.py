"""The config group ``policy`` of policies of the package lerobot."""

from typing import ClassVar, Literal

from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec, RandomNumbers
from vla_rl.policies.base.config import PolicyConfigBase


class LeRobotConfig(PolicyConfigBase):
    """A policy of the package lerobot (SmolVLA, π0, ACT, ...), for evaluation; policy.checkpoint is its folder.

    Of the actions that the model predicts at once, the first chunk_size are executed.
    """

    trainable: ClassVar[bool] = False
    recomputes_blocks: ClassVar[bool] = False

    name: Literal["lerobot"] = "lerobot"

    def spec(self, env: EnvSpec) -> PolicySpec:
        """The record are the actions; one number is the seed of what the model draws for a row."""
        chunk = (self.chunk_size, env.action_dim)
        return PolicySpec(*chunk, {"actions": ArrayLayout("<f4", chunk)}, {"seed": RandomNumbers(())})

    @property
    def discrete(self) -> bool:
        return False
