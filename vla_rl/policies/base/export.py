"""What `vla-rl export` asks of a policy. Does not load torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.core.records import EnvSpec
from vla_rl.policies.base.config import PolicyConfigBase


@dataclass(frozen=True, slots=True)
class Export:
    """A checkpoint that is to be written in another layout, to a new folder.

    A policy's builder says in ``EXPORT_FORMATS`` which names of layouts it knows, in ``EXPORT_OPTIONS`` which options.
    """

    checkpoint: Path  # of the policy
    format: str
    output: Path
    config: PolicyConfigBase | None = None  # of the run that made the checkpoint, if it is known
    spec: Callable[[], EnvSpec] | None = None  # of that run's simulator
    options: Mapping[str, Any] = field(default_factory=dict)  # those given, such as source or views

    @property
    def origin(self) -> dict[str, str]:
        """What the new checkpoint says about where it comes from."""
        return {"exported_from": str(self.checkpoint)}
