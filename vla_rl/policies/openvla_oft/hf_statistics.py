"""Chooses the data set whose statistics a checkpoint in the published layout un-normalizes its actions with."""

import re
from collections.abc import Mapping
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.action_codec import Bounds

_FILTERED = "_no_noops"  # OpenVLA's LIBERO data sets without the steps that do nothing
_SUITE = re.compile(r"(libero_(?:spatial|object|goal|10|90))(?![a-z0-9])")


def choose_unnorm_key(statistics: Mapping[str, Any], wanted: str | None, suite: str) -> str:
    """``policy.unnorm_key``, else the data set of the simulator's suite, else the only one if it is of no other suite.

    ``suite``: empty for a simulator without any. Raises UserError, which lists the data sets.
    """
    names = f"; found: {', '.join(sorted(statistics))}" if statistics else ""
    if not statistics:
        raise UserError("the checkpoint has no statistics (norm_stats in config.json or dataset_statistics.json)")
    if wanted is not None:
        if wanted not in statistics:
            raise UserError(f"policy.unnorm_key={wanted!r}: the checkpoint has no statistics of that name{names}")
        return wanted
    for name in (f"{suite}{_FILTERED}", suite):
        if suite and name in statistics:
            return name
    if len(statistics) == 1:
        (name,) = statistics
        other = _SUITE.match(name)
        if other is None or not suite or suite == other[1]:
            return name
        raise UserError(
            f"policy.unnorm_key=null: the checkpoint has statistics of {name} only, the run has env.suite={suite}; "
            f"name a checkpoint of that suite, or choose these statistics by policy.unnorm_key={name}"
        )
    raise UserError(
        f"policy.unnorm_key=null: the checkpoint has statistics of {len(statistics)} data sets; name one{names}"
    )


def read_bounds(statistics: Mapping[str, Any], key: str) -> tuple[Bounds, Bounds | None]:
    """Percentiles of actions, and of proprioception if there are any. Raises UserError."""
    entry = statistics[key]
    if not isinstance(entry, Mapping) or "action" not in entry:
        raise UserError(f"statistics of {key!r}: expected a mapping with the key action, found {entry!r}")
    proprio = entry.get("proprio")
    return _bounds(entry["action"], f"{key}.action"), None if proprio is None else _bounds(proprio, f"{key}.proprio")


def _bounds(values: Any, where: str) -> Bounds:
    """All dimensions are normalized where no mask says otherwise, as in the original code."""
    try:
        mask = values["mask"] if "mask" in values else [True] * len(values["q01"])
        return Bounds.from_dict({"q01": values["q01"], "q99": values["q99"], "mask": mask})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"statistics of {where}: need lists q01 and q99 and perhaps mask ({error})") from error
