"""Conventions in which a policy may have been trained otherwise than it is used, each one changed alone."""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from envs.base.image_conventions import AS_IT_IS, IMAGE_CONVENTIONS
from vla_rl.core.actions import ActionSpace
from vla_rl.core.records import Array, EnvSpec
from vla_rl.policies import PolicyConfig
from vla_rl.policies.build import alternatives

_RELATED = 0.7  # correlation of predictions and demonstrations from which their spreads say something
_FACTOR, _OFFSET = np.log(1.4), 0.3  # of a wrong scale; the second as a share of the spread
_OTHER_RANGES = (0.0, 1.0), (-1.0, 1.0)  # of grippers
_WRITTEN: Mapping[str, Callable[[str], str]] = {
    "in lower case": str.lower,
    "with a capital letter": lambda text: text[:1].upper() + text[1:],
    "with a full stop": lambda text: text.rstrip(".") + ".",
    "without a full stop": lambda text: text.rstrip("."),
    "with spaces for underscores": lambda text: text.replace("_", " "),
}
_SHIFTED: Mapping[str, Callable[[Array], Array]] = {  # [N, K, A]; the action at the end is repeated
    "later": lambda x: np.concatenate([x[:, :1], x[:, :-1]], axis=1),
    "earlier": lambda x: np.concatenate([x[:, 1:], x[:, -1:]], axis=1),
}
_CLONE = "and clone the demonstrations again (vla-rl sft)"
_IMAGES = f"let the simulator show them so (docs/diagnose.md); or set demos.rotated, or convert the data, {_CLONE}"
_CAMERAS = f"turn env.image, or the views of the simulator, around; or set demos.cameras {_CLONE}"
_PROMPT = "the policy expects its instructions so: change env.instruction, env.tasks or EnvSpec.instructions"
_STATE = "its numbers, their order or their unit are not those of the checkpoint's statistics: correct the simulator's"
_GRIPPER = f"the policy predicts it so: correct env.grippers, or ActionDim.data; or set demos.gripper {_CLONE}"
_CHUNK = f"the policy learned actions of another step: shift those of its data (vla-rl demos inspect) {_CLONE}"
_SIGN = f"the policy's axes are not the simulator's: turn them around there, or in the data {_CLONE}"
_SCALE = (
    "are demonstrated: the statistics are of other data or of another unit. Set policy.unnorm_key, repair the "
    "checkpoint's statistics, or correct env.action_limits"
)


class Trial(NamedTuple):
    """One changed convention; what is not given stays as it is."""

    name: str
    remedy: str = ""
    policy: Mapping[str, Any] = {}  # keys of the group ``policy``
    images: Callable[[Array], Array] = np.asarray  # of uint8 [N, V, H, W, 3]
    proprio: Callable[[Array], Array] = np.asarray  # of float32 [N, P]
    instructions: tuple[str, ...] | None = None
    actions: Callable[[Array], Array] = np.asarray  # of float32 [N, K, A], as they are predicted
    timing: bool = False  # it moves actions in time, which shows where they change
    error: float = 0.0  # filled in by ``vla-rl diagnose``, as all that follows
    smaller: tuple[float, float] = (0.0, 0.0)  # than the error as it is, by this range unless by chance
    in_time: bool = False  # of ``timing``: actions change together with the demonstrated ones, unless by chance


PRESENT = Trial("as it is")


def trials(policy: PolicyConfig, spec: EnvSpec, state: Array) -> Iterator[Trial]:
    """All conventions to try, but those of ``fitted``. ``state``: the mean proprioception, float32 [P]."""
    for name, turn in IMAGE_CONVENTIONS.items():
        if name != AS_IT_IS:
            yield Trial(f"images {name}", f"the policy expects images {name}: {_IMAGES}", images=turn)
    if len(spec.views) > 1:
        yield Trial("cameras in the other order", _CAMERAS, images=lambda images: images[:, ::-1])
    texts, tasks = spec.instructions, len(spec.instructions)
    changed = {name: tuple(map(change, texts)) for name, change in _WRITTEN.items()}
    changed |= {f"of the task {turn} further on": texts[turn:] + texts[:turn] for turn in sorted({1, tasks - 1})}
    for name, instructions in changed.items():
        if instructions != texts:
            yield Trial(f"instructions {name}", _PROMPT, instructions=instructions)
    if len(state):
        yield Trial("state left out", _STATE, proprio=lambda seen: np.broadcast_to(state, seen.shape).copy())
    for i in spec.actions.grippers:
        yield from _gripper(spec.actions, i)
    for name, turn in _SHIFTED.items():
        yield Trial(f"actions one step {name}", _CHUNK, actions=turn, timing=True)
    for keys in alternatives(policy, spec):  # last: each loads the checkpoint again
        text = " ".join(f"policy.{name}={json.dumps(value)}" for name, value in keys.items())
        yield Trial(text, f"set {text}", policy=keys)


def _gripper(space: ActionSpace, i: int) -> Iterator[Trial]:
    dim = space.dims[i]
    own = dim.low, dim.high
    for (low, high), turned in product(dict.fromkeys([own, *_OTHER_RANGES]), (False, True)):
        ways = [f"from {low:g} to {high:g}"] * ((low, high) != own) + ["turned around"] * turned
        scale = (dim.high - dim.low) / (high - low) * (-1 if turned else 1)
        if ways:
            line = {i: (scale, (dim.high if turned else dim.low) - scale * low)}
            yield Trial(f"{dim.name} {', '.join(ways)}", _GRIPPER, actions=_line(line, space))


def _line(lines: Mapping[int, tuple[float, float]], space: ActionSpace) -> Callable[[Array], Array]:
    """Of actions [..., A]: dimension i times ``lines[i][0]``, plus ``lines[i][1]``."""
    scale, shift = np.ones(len(space), np.float32), np.zeros(len(space), np.float32)
    for i, line in lines.items():
        scale[i], shift[i] = line
    return lambda actions: actions * scale + shift


def fitted(predicted: Array, demonstrated: Array, space: ActionSpace) -> Iterator[Trial]:
    """Signs and scales that predictions and demonstrations, float [n, A] each, contradict.

    A scale is the ratio of their spreads: the slope of a least-squares line is flattened by the policy's own errors.
    """
    turned, scaled = {}, {}
    for i, (dim, x, y) in enumerate(zip(space.dims, predicted.T, demonstrated.T, strict=True)):
        if dim.gripper is not None or min(x.std(), y.std()) < 1e-3 * (dim.high - dim.low):
            continue
        related, scale = np.corrcoef(x, y)[0, 1], float(y.std() / x.std())
        if related < -_RELATED:
            turned[i] = -1.0, dim.low + dim.high
        elif related > _RELATED and (abs(np.log(scale)) > _FACTOR or abs(y.mean() - x.mean()) > _OFFSET * y.std()):
            scaled[i] = scale, float(y.mean() - scale * x.mean())
    if turned:
        yield Trial("other sign of " + ", ".join(space.names[i] for i in turned), _SIGN, actions=_line(turned, space))
    if scaled:
        lines = ", ".join(f"{a:.2f} times {space.names[i]} plus {b:.2f}" for i, (a, b) in scaled.items())
        name = "other scale of " + ", ".join(space.names[i] for i in scaled)
        yield Trial(name, f"{lines} {_SCALE}", actions=_line(scaled, space))
