"""REINFORCE with a leave-one-out baseline (arXiv:2402.14740), as in RIPT-VLA (arXiv:2505.17016)."""

from typing import Literal

from pydantic import Field

from algos.advantages import Baseline, Scale
from algos.grpo import GroupRelative, GroupRelativeConfig


class RLOOConfig(GroupRelativeConfig):
    """A return is compared with the mean of the others of its group: an unbiased baseline, and no scaling."""

    name: Literal["rloo"] = "rloo"
    baseline: Baseline = Field("leave_one_out", description="See GRPO.")
    scale: Scale = Field("none", description="See GRPO.")


class RLOO(GroupRelative):
    """See ``RLOOConfig``."""

    Config = RLOOConfig
