"""Whether a checkpoint fits the keys with which its run is to go on. Reads headers only, and starts no process."""

import math
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import json_or_empty, shapes_in_safetensors
from vla_rl.core.kept_episodes import BORDER
from vla_rl.core.records import EnvSpec

_GROUPS = {"env", "policy", "algo", "world_model"}  # whose keys give saved state its shape
_SHOWN = 6  # keys in a message
_EPISODES = {"trajectories.npz": "0.", "learner/anchors.npz": ""}  # prefix of the first one's arrays
_WEIGHT = ":weight"
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def require_fit(config: RunConfig, run: Path, checkpoint: Path, spec: EnvSpec) -> None:
    """Raises UserError, which names the changed keys and what of ``checkpoint`` they do not fit."""
    own = None
    with suppress(UserError):  # the request may be what corrects it
        own = load_config(run / "config.yaml")
    before = {} if own is None else _keys(own)
    changed = [f"{key}={value}" for key, value in _keys(config).items() if key not in before or before[key] != value]
    problem = next(_problems(config, own, checkpoint, spec), None) if changed else None
    if problem:
        keys = ", ".join(changed[:_SHOWN]) + (f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else "")
        raise UserError(
            f"--resume {run}: with {keys}, {problem}; leave these keys out, or start a new run with "
            f"policy.checkpoint={checkpoint / 'policy'}"
        )


def _keys(config: RunConfig) -> dict[str, Any]:
    groups = config.model_dump(mode="json", include=_GROUPS)
    return {f"{group}.{key}": value for group, keys in groups.items() for key, value in (keys or {}).items()}


def _problems(config: RunConfig, own: RunConfig | None, checkpoint: Path, spec: EnvSpec) -> Iterator[str]:
    tasks = json_or_empty(checkpoint / "policy" / "metadata.json").get("instructions", list(spec.instructions))
    if tasks != list(spec.instructions):
        yield f"the tasks are {len(spec.instructions)} others than the {len(tasks)} that the run counts successes of"
    if config.world_model is not None and not (checkpoint / "world_model").is_dir():
        yield f"the run gets a world model, and {checkpoint} has none"
    policy = config.policy.spec(spec)
    size = spec.image_size
    wanted = {name: (layout.dtype, layout.shape) for name, layout in policy.record.items()}
    wanted = {f"record.{name}": layout for name, layout in wanted.items()}
    wanted |= {"images": ("|u1", (len(spec.views), size, size, 3)), "proprio": ("<f4", (spec.proprio_dim,))}
    for name, prefix in _EPISODES.items():
        arrays = _arrays_in(checkpoint / name)
        held = {key.removeprefix(prefix): layout for key, layout in arrays.items() if key.startswith(prefix)}
        held = {key: layout for key, layout in held.items() if key in wanted or key.startswith("record.")}
        for key in sorted(held.keys() | wanted.keys()) if held else ():
            if held.get(key) != wanted.get(key):
                yield f"{key} is {_shown(wanted.get(key))} of each chunk, and {_shown(held.get(key))} in {name}"
    yield from _other_critic(config, policy.chunk_size * policy.action_dim, checkpoint / "learner/critic.safetensors")
    if own is None or (config.policy, config.env) != (own.policy, own.env):
        yield from _other_weights(config, own, checkpoint / "learner/state", spec)


def _arrays_in(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Data type and shape, without the first axis, of the arrays of an .npz file; none if there is no file."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    shape, _, dtype = _READ_HEADER[np.lib.format.read_magic(file)](file)
                found[name.removesuffix(".npy")] = dtype.str, shape[1:]
    return {name: layout for name, layout in found.items() if not name.endswith(BORDER)}


def _shown(layout: tuple[str, tuple[int, ...]] | None) -> str:
    return "no part" if layout is None else f"{list(layout[1])} {np.dtype(layout[0]).name}"


def _other_critic(config: RunConfig, actions: int, file: Path) -> Iterator[str]:
    members = getattr(config.algo, "critics", None)
    if members is None or not file.is_file():
        return
    shapes = shapes_in_safetensors(file)
    rates = [shape[1] for name, shape in shapes.items() if re.fullmatch(r"online\.q\.\d+\.0\.weight", name)]
    held = len(rates), rates[0] - shapes["online.v.0.weight"][1]
    if held != (members, actions):
        yield (
            f"the critic is {members} networks that rate {actions} numbers, and {held[0]} that rate {held[1]} in {file}"
        )


def _other_weights(config: RunConfig, own: RunConfig | None, folder: Path, spec: EnvSpec) -> Iterator[str]:
    from vla_rl.policies.build import build_policy, policy_sizes

    files = [shapes_in_safetensors(file) for file in folder.glob("*.safetensors")]
    held = {name.removesuffix(_WEIGHT): s for part in files for name, s in part.items() if name.endswith(_WEIGHT)}
    if held and config.policy.checkpoint is not None and own is not None:  # which would have to be read
        saved = sum(map(math.prod, held.values()))
        before, now = (policy_sizes(each.policy, spec, 4).trained for each in (own, config))
        if before == saved != now:  # sizes of some policies are estimates; the learner itself compares names and shapes
            yield f"the policy trains {now:,} numbers, and {saved:,} in {folder}"
    elif held:
        prompts = config.algo.prompts(spec.instructions)
        policy = build_policy(config.policy, spec, config.seed, prompts, device="meta")
        wanted = {name: tuple(parameter.shape) for name, parameter in policy.trained_parameters().items()}
        if wrong := sorted(name for name in held.keys() | wanted.keys() if held.get(name) != wanted.get(name)):
            one = f"{wrong[0]}: {wanted.get(wrong[0])}, and {held.get(wrong[0])} in {folder}"
            yield f"the policy trains other weights ({len(wrong)} differ, such as {one})"
