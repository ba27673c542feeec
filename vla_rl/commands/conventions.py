"""Conventions in which a policy may have been trained otherwise than it is used, each one changed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.base.image_conventions import AS_IT_IS, IMAGE_CONVENTIONS
from vla_rl.core.actions import ActionSpace
from vla_rl.core.records import Array, EnvSpec
from vla_rl.policies import PolicyConfig
from vla_rl.policies.build import alternatives

_RELATED = 0.7  # correlation from which a line through predictions and demonstrations says something
_FACTOR = 1.4  # a scale that is wrong
_OFFSET = 0.3  # likewise, as a share of the spread
_FEW_TASKS = 4  # whose instructions are tried in every order of turns
_RANGES = (0.0, 1.0), (-1.0, 1.0)  # of grippers
_CLONE = "clone such demonstrations again (vla-rl sft)"


def _same(values: Any) -> Any:
    return values


@dataclass(frozen=True, slots=True)
class Trial:
    """One changed convention; what is not given stays as it is."""

    name: str
    remedy: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)  # keys of the group ``policy``
    images: Callable[[Array], Array] = _same  # of uint8 [N, V, H, W, 3]
    proprio: Callable[[Array], Array] = _same  # of float32 [N, P]
    instructions: Callable[[tuple[str, ...]], tuple[str, ...]] = _same
    actions: Callable[[Array], Array] = _same  # of float32 [N, K, A], as they are predicted

    @property
    def sees_the_same(self) -> bool:
        """Whether the policy predicts what it does as it is."""
        return not self.policy and self.images is self.proprio is self.instructions is _same


PRESENT = Trial("as it is")


def trials(policy: PolicyConfig, spec: EnvSpec, state: Array) -> list[Trial]:
    """All conventions to try, but those that ``fitted`` finds. ``state``: the mean proprioception, float [P]."""
    return [
        *_images(spec),
        *_keys(policy, spec),
        *_prompts(len(spec.instructions)),
        *_state(state),
        *_grippers(spec.actions),
        *(_chunks() if policy.chunk_size > 1 else ()),
    ]


def _images(spec: EnvSpec) -> Iterator[Trial]:
    for name, turn in IMAGE_CONVENTIONS.items():
        if name != AS_IT_IS:
            remedy = (
                f"the policy expects images {name}: let the simulator show them so (a class around it, "
                "docs/diagnose.md), or train with images as they are: set demos.rotated, or convert the data, and "
                f"{_CLONE}"
            )
            yield Trial(f"images {name}", remedy, images=turn)
    if len(spec.views) > 1:
        remedy = (
            f"the policy expects the cameras {', '.join(spec.views)} in the other order: turn env.image, or the views of "
            f"the simulator, around; or set demos.cameras and {_CLONE}"
        )
        yield Trial("cameras in the other order", remedy, images=lambda images: images[:, ::-1])


def _keys(policy: PolicyConfig, spec: EnvSpec) -> Iterator[Trial]:
    for keys in alternatives(policy, spec):
        text = " ".join(
            f"policy.{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in keys.items()
        )
        yield Trial(text, f"set {text}", keys)


def _prompts(tasks: int) -> Iterator[Trial]:
    written: dict[str, Callable[[str], str]] = {
        "in lower case": str.lower,
        "with a full stop": lambda text: text.rstrip(".") + ".",
        "without a full stop": lambda text: text.rstrip("."),
        "with a capital letter": lambda text: text[:1].upper() + text[1:],
        "with spaces for underscores": lambda text: text.replace("_", " "),
    }
    for name, change in written.items():
        remedy = f"the policy expects instructions {name}: write the simulator's so (env.instruction, or EnvSpec.instructions)"
        yield Trial(f"instructions {name}", remedy, instructions=lambda texts, change=change: tuple(map(change, texts)))
    for turns in range(1, tasks) if tasks <= _FEW_TASKS else (1, tasks - 1):
        remedy = (
            f"each task goes by the instruction of the task {turns} further on: compare env.tasks, and the order of the "
            "simulator's instructions, with what the policy was trained on"
        )
        yield Trial(
            f"instructions of the task {turns} further on",
            remedy,
            instructions=lambda texts, turns=turns: texts[turns:] + texts[:turns],
        )


def _state(mean: Array) -> Iterator[Trial]:
    if len(mean):
        remedy = (
            "the policy does better without its state (proprioception): its numbers, their order or unit are others than "
            "those of training; compare them with the checkpoint's statistics, or set env.proprio=false and train anew"
        )
        yield Trial("state left out", remedy, proprio=lambda seen: np.broadcast_to(mean, seen.shape).astype(np.float32))


def _grippers(space: ActionSpace) -> Iterator[Trial]:
    """A gripper of the simulator goes from ``low`` to ``high``, or is predicted in another range or the other way."""
    for i in space.grippers:
        dim = space.dims[i]
        for low, high in dict.fromkeys([(dim.low, dim.high), *_RANGES]):
            for turned in (False, True):
                scale = (dim.high - dim.low) / (high - low) * (-1 if turned else 1)
                shift = (dim.high if turned else dim.low) - scale * low
                if (scale, shift) == (1, 0):
                    continue
                ways = [f"from {low:g} to {high:g}"] * ((low, high) != (dim.low, dim.high)) + ["turned around"] * turned
                name = f"{dim.name} {' and '.join(ways)}"
                remedy = (
                    f"the policy predicts {name}, and the simulator takes {dim.low:g} to {dim.high:g}: correct its "
                    f"declaration (env.grippers, or ActionDim.data), or set demos.gripper and {_CLONE}"
                )
                yield Trial(name, remedy, actions=_line({i: (scale, shift)}, space))


def _chunks() -> Iterator[Trial]:
    remedy = f"the policy was trained on actions of a step too {{}}: shift those of its data by one (vla-rl demos inspect) and {_CLONE}"
    late = Trial(
        "actions one step later", remedy.format("late"), actions=lambda x: np.concatenate([x[:, :1], x[:, :-1]], 1)
    )
    early = Trial(
        "actions one step earlier", remedy.format("early"), actions=lambda x: np.concatenate([x[:, 1:], x[:, -1:]], 1)
    )
    return iter((late, early))


def _line(lines: Mapping[int, tuple[float, float]], space: ActionSpace) -> Callable[[Array], Array]:
    """Of actions [..., A]: dimension i times ``lines[i][0]``, plus ``lines[i][1]``."""
    scale, shift = np.ones(len(space), np.float32), np.zeros(len(space), np.float32)
    for i, line in lines.items():
        scale[i], shift[i] = line
    return lambda actions: actions * scale + shift


def fitted(predicted: Array, demonstrated: Array, space: ActionSpace) -> Iterator[Trial]:
    """Signs and scales that a line through predictions and demonstrations, float [n, A] each, contradicts."""
    turned, scaled = {}, {}
    for i, dim in enumerate(space.dims):
        x, y = predicted[:, i].astype(np.float64), demonstrated[:, i].astype(np.float64)
        if dim.gripper is not None or min(x.std(), y.std()) < 1e-3 * (dim.high - dim.low):
            continue
        related = np.corrcoef(x, y)[0, 1]
        slope, offset = np.polyfit(x, y, 1)
        if related < -_RELATED:
            turned[i] = -1.0, dim.low + dim.high
        wrong = abs(np.log(max(slope, 1e-9))) > np.log(_FACTOR) or abs(y.mean() - x.mean()) > _OFFSET * y.std()
        if related > _RELATED and wrong:
            scaled[i] = float(slope), float(offset)
    if turned:
        names = ", ".join(space.names[i] for i in turned)
        remedy = (
            f"the policy predicts {names} with the other sign: its axes are others than the simulator's; turn them around "
            f"there, or in the data and {_CLONE}"
        )
        yield Trial(f"other sign of {names}", remedy, actions=_line(turned, space))
    if scaled:
        lines = ", ".join(f"{space.names[i]} times {a:.2f} plus {b:.2f}" for i, (a, b) in scaled.items())
        remedy = (
            f"the demonstrations are what the policy predicts for {lines}: its statistics are of other data or of another "
            "unit; set policy.unnorm_key where the checkpoint has several, repair its statistics file, or limits of the "
            "simulator's actions (env.action_limits)"
        )
        yield Trial(f"other scale of {', '.join(space.names[i] for i in scaled)}", remedy, actions=_line(scaled, space))
