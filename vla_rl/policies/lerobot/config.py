"""The config group ``policy`` of policies of the package lerobot."""

from pathlib import Path
from typing import Any, Literal

from vla_rl.core.files import json_or_empty
from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec, RandomNumbers
from vla_rl.policies.base.flow_config import FlowConfig

FLOWS = ("smolvla", "pi0", "pi05")  # types that denoise chunks by flow matching


class LeRobotConfig(FlowConfig):
    """A policy of the package lerobot; policy.checkpoint is its folder. SmolVLA, π0 and π0.5 are trained and evaluated,
    others (ACT, ...) evaluated. Keys of noise and denoising are for the former.

    Of the actions that the model predicts at once, the first chunk_size are executed.
    """

    name: Literal["lerobot"] = "lerobot"

    @property
    def trainable(self) -> bool:
        return self.checkpoint is None or self.saved.get("type") in FLOWS

    @property
    def saved(self) -> dict[str, Any]:
        """What lerobot's own config.json says; nothing for a folder that is not on this machine."""
        return {} if self.checkpoint is None else json_or_empty(Path(self.checkpoint) / "config.json")

    @property
    def steps(self) -> int:
        saved = self.saved
        return self.denoise_steps or saved.get("num_steps") or saved.get("num_inference_steps") or 10

    def lengths(self, env: EnvSpec) -> tuple[int, int]:
        saved = self.saved
        return saved["chunk_size"], saved["max_action_dim"]

    def spec(self, env: EnvSpec) -> PolicySpec:
        """The record of a policy that is only evaluated are the actions; one number is the seed of what a row draws."""
        if self.trainable:
            return super().spec(env)
        chunk = (self.chunk_size, env.action_dim)
        return PolicySpec(*chunk, {"actions": ArrayLayout("<f4", chunk)}, {"seed": RandomNumbers(())})
