"""Configuration of policies with a Gaussian over action chunks. Importing this file does not load torch."""

import logging
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from vla_rl.core.errors import UserError
from vla_rl.core.records import ArrayLayout, EnvSpec, PolicySpec, RandomNumbers
from vla_rl.core.schema import PositiveFloat
from vla_rl.policies.base.config import PolicyConfigBase

logger = logging.getLogger(__name__)
ABOUT = "policy.json"
_FORMAT = "vla_rl gaussian"
_TASKS = "instructions"  # of the tasks; others than these can be learned


class GaussianPolicyConfig(PolicyConfigBase):
    """Keys of every ``GaussianPolicy``."""

    has_blocks: ClassVar[bool] = False
    name: str = "gaussian"
    initial_std: PositiveFloat = Field(
        0.3, description="Standard deviation of normalized actions (about -1 to 1) before training; it is learned."
    )

    def spec(self, env: EnvSpec) -> PolicySpec:
        chunk = self.chunk_size, env.action_dim
        return PolicySpec(*chunk, {"actions": ArrayLayout("<f4", chunk)}, {"noise": RandomNumbers(chunk, "normal")})

    @property
    def regresses(self) -> bool:
        return True

    @property
    def draws_normal(self) -> bool:
        return True

    @property
    def discrete(self) -> bool:
        return False

    def about(self, kind: str, env: EnvSpec) -> dict[str, Any]:
        """What a checkpoint says of its policy. ``kind``: the name of its class."""
        seen = {name: getattr(env, name) for name in ("image_size", "proprio_dim", "action_dim")}
        about = {"format": _FORMAT, "class": kind, "views": len(env.views), "chunk_size": self.chunk_size}
        return about | seen | {_TASKS: list(env.instructions)}

    def known_tasks(self, env: EnvSpec) -> tuple[str, ...]:
        """The instructions of the checkpoint's tasks, in their order. An old one's are taken for the simulator's."""
        from vla_rl.policies.base.checkpoint_folder import read_json  # loads torch

        assert self.checkpoint is not None
        return tuple(read_json(Path(self.checkpoint), ABOUT).get(_TASKS, env.instructions))

    def check_checkpoint(self, kind: str, env: EnvSpec) -> None:
        """Raise UserError if the checkpoint is another policy's, or was made for other observations or actions."""
        if self.checkpoint is None:
            return
        from vla_rl.policies.base.checkpoint_folder import read_json  # loads torch

        found, wanted = read_json(Path(self.checkpoint), ABOUT), self.about(kind, env)
        if differences := [
            f"{name}={found.get(name)!r}, not {value!r}"
            for name, value in wanted.items()
            if name != _TASKS and found.get(name) != value
        ]:
            raise UserError(f"policy.checkpoint={self.checkpoint} was made with {'; '.join(differences)}")
        known = self.known_tasks(env)
        if new := [repr(text) for text in env.instructions if text not in known]:
            logger.warning("policy.checkpoint=%s has not been trained on %s", self.checkpoint, ", ".join(new))
