"""CUDA graphs: what an inference batch launches is recorded once for each size of batch, and replayed as a whole.

    observation, draws ── copy ──▶ [ fixed inputs ] ── replay ──▶ [ fixed outputs ]

A small batch, or a small policy, takes a GPU less time than the processor needs to launch its kernels one by one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vla_rl.core.errors import UserError
from vla_rl.policies.base.policy import Decisions, PolicyInput

Act = Callable[[PolicyInput, Mapping[str, Tensor], Tensor, float], Decisions]
Record = Callable[[Callable[[], Decisions]], tuple[Decisions, Callable[[], Any]]]

_WARM_UP = 3  # calls before the recording: libraries choose algorithms and allocate at the first ones


@dataclass(frozen=True, slots=True)
class _Recorded:
    inputs: tuple[Tensor, ...]
    decisions: Decisions
    replay: Callable[[], Any]


class GraphedAct:
    """``Policy.act`` by replaying. A batch's decisions are valid until the next call.

    Weights may change in place. Whoever moves them calls ``forget``.
    """

    def __init__(self, act: Act, record: Record | None = None) -> None:
        """``record`` is given a function without arguments. It returns the function's decisions, and a function that
        computes the same tensors again from the present inputs. None: recorded as a CUDA graph."""
        self._act, self._record = act, record or _CudaGraphs()
        self._recorded: dict[Any, _Recorded] = {}

    def __call__(self, seen: PolicyInput, draws: Mapping[str, Tensor], greedy: Tensor, temperature: float) -> Decisions:
        """Raises UserError if the policy's act cannot be recorded."""
        names = tuple(draws)
        given = (*(getattr(seen, f.name) for f in fields(seen)), *(draws[name] for name in names), greedy)
        key = names, temperature, *((tensor.shape, tensor.dtype) for tensor in given)
        if key not in self._recorded:
            self._recorded[key] = self._new(given, names, temperature)
        recorded = self._recorded[key]
        for mine, theirs in zip(recorded.inputs, given, strict=True):
            mine.copy_(theirs)
        recorded.replay()
        return recorded.decisions

    def forget(self) -> None:
        """Everything: the weights will lie elsewhere."""
        self._recorded.clear()

    def _new(self, given: tuple[Tensor, ...], names: tuple[str, ...], temperature: float) -> _Recorded:
        inputs = tuple(tensor.clone() for tensor in given)
        count = len(fields(PolicyInput))
        seen, draws, greedy = PolicyInput(*inputs[:count]), dict(zip(names, inputs[count:-1], strict=True)), inputs[-1]
        try:
            decisions, replay = self._record(lambda: self._act(seen, draws, greedy, temperature))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"placement.cuda_graphs=true: this policy's inference cannot be recorded ({reason}); set it to false"
            ) from error
        return _Recorded(inputs, decisions, replay)


class _CudaGraphs:
    """Records on the current device. Graphs share their memory: only one is replayed at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Decisions]) -> tuple[Decisions, Callable[[], Any]]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            decisions = call()
        return decisions, graph.replay
