"""REINFORCE with a leave-one-out baseline (arXiv:2402.14740), as in RIPT-VLA (arXiv:2505.17016)."""

from __future__ import annotations

from typing import Literal

from algos.grpo import GroupRelative


class RLOO(GroupRelative):
    """A return is compared with the mean of the others of its group: an unbiased baseline, and nothing is divided."""

    name: Literal["rloo"] = "rloo"
    baseline: Literal["mean", "leave_one_out"] = "leave_one_out"
    scale: Literal["group", "batch", "none"] = "none"
