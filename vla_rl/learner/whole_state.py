"""The learner's state by parameter: float32 weights, AdamW's moments and averages, whole, whatever ranks and ZeRO do.

    engine (shards of ranks) ──gather──▶ one parameter at a time ──▶ files, one for each rank ──▶ any other engine

A state that was written by some ranks, under some ZeRO stage and in some precision, can be read under any other. The
files are safetensors: data, and never code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from vla_rl.core.errors import UserError
from vla_rl.core.postponed import write
from vla_rl.core.tensor_files import reading, write_tensors
from vla_rl.policies.base.policy import Policy

_WEIGHT, _STEP = "weight", "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE, UPDATES = "average", "updates"  # of the weights, beside their moments (``weight_average``); its count
_SEPARATOR = ":"


class WholeState:
    """Reads and writes what an engine holds of each trained parameter. Both are collective."""

    def __init__(self, engine: Any, policy: Policy, rank: int, world_size: int) -> None:
        self._engine, self._policy, self._rank, self._world_size = engine, policy, rank, world_size
        self._shards = _shards(engine)

    def averaged(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """What this rank holds of the weights, in float32, each with its state: ``AVERAGE``, a tensor like it, and
        ``UPDATES``, from 0. They are made here if there are none."""
        holders = {id(holder): holder for holder in map(self._shards.holder, self._trained.values())}
        pairs = [(holder.detach(), self._state_of(holder)) for holder in holders.values()]
        if any(AVERAGE not in state for _, state in pairs):
            for weights, state in pairs:
                state |= {AVERAGE: torch.zeros_like(weights), UPDATES: 0}
            self._shards.link()
        return pairs

    def has_average(self) -> bool:
        """Whether there are averages of one update or more."""
        states = self._engine.basic_optimizer.state
        return any(states.get(self._shards.holder(p), {}).get(UPDATES) for p in self._trained.values())

    def average(self, parameter: nn.Parameter) -> Tensor:
        """The whole average of a parameter, in float32; collective. It may be a view."""
        return self._shards.get(parameter, AVERAGE)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """A whole weight, in float32; collective. It may be a view."""
        self._shards.link()
        return self._shards.get(parameter, None)

    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Change a weight; its moments stay as they are. Collective: all ranks give the same whole value."""
        self._shards.set_weight(parameter, value)

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return self._policy.trained_parameters()

    def save(self, folder: Path) -> None:
        """Write ``folder``, now or later (``postponed``): each rank a part of the parameters."""
        self._shards.link()
        mine: dict[str, Tensor] = {}
        for number, (name, parameter) in enumerate(self._trained.items()):
            for part, value in self._gather(parameter):
                if number % self._world_size == self._rank:
                    mine[f"{name}{_SEPARATOR}{part}"] = value.detach().to("cpu", copy=True).contiguous()
        path = folder / f"{self._rank}-of-{self._world_size}.safetensors"
        write(path, partial(write_tensors, mine, path))

    def _gather(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        yield _WEIGHT, self._shards.get(parameter, None)
        state = self._engine.basic_optimizer.state.get(self._shards.holder(parameter), {})
        if _STEP in state:
            yield _STEP, torch.as_tensor(state[_STEP], dtype=torch.float32).reshape(1)
            yield from ((moment, self._shards.get(parameter, moment)) for moment in _MOMENTS)
        if AVERAGE in state:
            yield UPDATES, torch.tensor([state[UPDATES]])
            yield AVERAGE, self._shards.get(parameter, AVERAGE)

    def load(self, folder: Path, *, average: bool = False) -> None:
        """Continue from ``save``, with the ``average`` if that is asked for and there.

        Raises UserError if files are missing, damaged, or of another policy.
        """
        trained = self._trained
        with _Reader(folder) as found:
            wrong = sorted(found.names ^ trained.keys())
            wrong += [n for n, p in trained.items() if n in found.names and found.shape(n) != _shape(p)]
            if wrong:
                raise UserError(
                    f"policy: the saved learner has other weights ({len(wrong)} differ, such as {wrong[0]}); resume "
                    "with the run's own keys of the group policy, or start a new run from its policy by "
                    "policy.checkpoint"
                )
            self._make_moments({name: p for name, p in trained.items() if found.has(name, _STEP)}, found)
            for name, parameter in trained.items():
                self._shards.set_weight(parameter, found.read(name, _WEIGHT))
                for moment in _MOMENTS if found.has(name, _STEP) else ():
                    self._shards.set(parameter, moment, found.read(name, moment))
            if average and all(found.has(name, AVERAGE) for name in trained):
                self.averaged()
                for name, parameter in trained.items():
                    self._shards.set(parameter, AVERAGE, found.read(name, AVERAGE))
                    self._state_of(self._shards.holder(parameter))[UPDATES] = int(found.read(name, UPDATES))

    def _make_moments(self, stepped: dict[str, nn.Parameter], found: _Reader) -> None:
        """A new optimizer has none before its first step."""
        for name, parameter in stepped.items():
            state = self._state_of(self._shards.holder(parameter))
            state[_STEP].fill_(max(float(state[_STEP]), float(found.read(name, _STEP)[0])))
        self._shards.link()

    def _state_of(self, holder: Tensor) -> dict[str, Any]:
        """Of the optimizer, made as it would be at its first step."""
        optimizer = self._engine.basic_optimizer
        state: dict[str, Any] = optimizer.state[holder]
        if _STEP not in state:
            fused = any(group.get("fused") for group in optimizer.param_groups)
            state[_STEP] = torch.zeros((), device=holder.device if fused else "cpu")
            state.update({moment: torch.zeros_like(holder) for moment in _MOMENTS})
        return state


class _Whole:
    """Without ZeRO: float32 weights and moments are whole on every rank."""

    def __init__(self, optimizer: Any, masters: dict[int, Tensor]) -> None:
        """``optimizer``: AdamW; ``masters``: of parameters in bfloat16, by their ids."""
        self._optimizer, self._masters = optimizer, masters

    def holder(self, parameter: nn.Parameter) -> Tensor:
        """By what the optimizer keeps the state of a parameter."""
        return self._masters.get(id(parameter), parameter)

    def get(self, parameter: nn.Parameter, moment: str | None) -> Tensor:
        """A moment, or the float32 weight (None), whole."""
        holder = self.holder(parameter)
        found: Tensor = holder.detach() if moment is None else self._optimizer.state[holder][moment]
        return found

    def set(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        self._optimizer.state[self.holder(parameter)][moment].copy_(value)

    @torch.no_grad()
    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        self.holder(parameter).copy_(value)
        parameter.copy_(value)

    def link(self) -> None:
        """Call after the optimizer may have got new moments."""


class _Flat:
    """DeepSpeed's optimizers for bfloat16 and for ZeRO 1 and 2: each rank has a part of flat float32 tensors."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        low = hasattr(optimizer, "bf16_groups")
        groups = optimizer.bf16_groups if low else optimizer.bit16_groups
        flat = optimizer.fp32_groups_flat_partition if low else optimizer.single_partition_of_fp32_groups
        self._holders = {id(p): part for group, part in zip(groups, flat, strict=True) for p in group}

    def holder(self, parameter: nn.Parameter) -> Tensor:
        return self._holders[id(parameter)]

    def get(self, parameter: Any, moment: str | None) -> Tensor:
        found: Tensor = parameter.get_full_hp_param(moment)
        return found

    def set(self, parameter: Any, moment: str, value: Tensor) -> None:
        parameter.set_full_hp_param(value, moment)

    @torch.no_grad()
    def set_weight(self, parameter: Any, value: Tensor) -> None:
        parameter.set_full_hp_param(value)
        parameter.copy_(value)

    def link(self) -> None:
        self._optimizer._hp_optimizer_states_linked = False  # DeepSpeed links after the first group's first step
        self._optimizer._lazy_init_hp_params_optimizer_state()


class _Divided:
    """ZeRO 3: parameters are divided, too."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def holder(self, parameter: nn.Parameter) -> Tensor:
        group = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)][0]
        found: Tensor = self._optimizer.fp32_partitioned_groups_flat[group]
        return found

    def get(self, parameter: nn.Parameter, moment: str | None) -> Tensor:
        found: Tensor = self._optimizer.get_full_hp_param(parameter, moment)
        return found

    @torch.no_grad()
    def set(self, parameter: nn.Parameter, moment: str | None, value: Tensor) -> None:
        # DeepSpeed's own setter fails where the last rank's part is padded
        part, _ = self._optimizer._get_fp32_opt_state_partition(parameter, False, moment)
        start = part.numel() * self._optimizer._get_param_partition_rank(parameter)
        mine = value.flatten()[start : start + part.numel()]
        part[: mine.numel()].copy_(mine)

    def set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        import deepspeed

        self.set(parameter, None, value)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)

    def link(self) -> None:
        """They are always found by their parameters."""


def _shards(engine: Any) -> _Whole | _Flat | _Divided:
    if engine.zero_optimization_stage() == 3:
        return _Divided(engine.optimizer)
    if engine.zero_optimization_stage() or hasattr(engine.optimizer, "bf16_groups"):
        return _Flat(engine.optimizer)
    masters = {}
    if engine.bfloat16_enabled():
        pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        masters = {id(p): master for low, high in pairs for p, master in zip(low, high, strict=True)}
    return _Whole(engine.basic_optimizer, masters)


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class _Reader:
    """The files of a state as one."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*-of-*.safetensors"))
        count = int(paths[0].stem.rpartition("-")[2]) if paths else 1
        for rank in range(count):
            path = folder / f"{rank}-of-{count}.safetensors"
            if not path.is_file():
                raise UserError(f"{path} is missing: the checkpoint is incomplete; resume another one: RUN@ITERATION")
        self._paths = paths
        self._files: dict[str, Any] = {}  # by key

    def __enter__(self) -> _Reader:
        for path in self._paths:
            with reading(path):
                file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    @property
    def names(self) -> set[str]:
        return {key.rpartition(_SEPARATOR)[0] for key in self._files}

    def has(self, name: str, part: str) -> bool:
        return f"{name}{_SEPARATOR}{part}" in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        key = f"{name}{_SEPARATOR}{_WEIGHT}"
        return tuple(self._files[key].get_slice(key).get_shape()) if key in self._files else ()

    def read(self, name: str, part: str) -> Tensor:
        key = f"{name}{_SEPARATOR}{part}"
        found: Tensor = self._files[key].get_tensor(key)
        return found
