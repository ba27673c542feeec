"""Every way to divide devices among the roles, and the one that ``placement.mode`` means."""

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

from envs.maniskill.config import ManiSkillConfig
from envs.workload.config import WorkloadConfig
from vla_rl.config.run_config import RunConfig
from vla_rl.placement.plan import Layout, Mode, PlanError
from vla_rl.placement.resources import Kind, Resources


def simulator_on_devices(config: RunConfig, kind: Kind) -> bool:
    """Whether the simulator computes on devices of this kind, rather than on cores."""
    if isinstance(config.env, ManiSkillConfig):
        return kind == "cuda" and config.env.backend == "physx_cuda"
    return isinstance(config.env, WorkloadConfig) and config.env.on_devices


def layouts(devices: int, on_devices: bool, mode: Mode | None = None) -> Iterator[Layout]:
    """Every way to divide the devices among the roles, of all modes or of one.

    ``on_devices``: whether the simulator needs devices too.
    """
    everything = tuple(range(devices))
    if mode in (None, "collocated"):
        yield Layout("collocated", everything if on_devices else (), everything, everything)
    if mode in (None, "pipelined"):
        for parts in _partitions(everything, 3 if on_devices else 2):
            yield Layout("pipelined", *(parts if on_devices else ((), *parts)))
    if mode in (None, "hybrid"):
        for first, second in _partitions(everything, 2):
            yield Layout("hybrid", *((first, second) if on_devices else ((), first)), learner=everything)


def _partitions(devices: tuple[int, ...], parts: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to cut a sequence into that many contiguous parts, none empty; beyond 64 devices, in coarser steps."""
    step = math.ceil(len(devices) / 64)
    for cuts in combinations(range(step, len(devices), step), parts - 1):
        yield tuple(devices[i:j] for i, j in pairwise((0, *cuts, len(devices))))


def usable_devices(config: RunConfig, resources: Resources) -> int:
    """How many devices there are to divide: ``placement.devices`` or all; of cores, those that simulators leave.

    Raises PlanError if ``placement.devices`` asks for more than there are.
    """
    there = resources.devices
    if resources.kind == "cpu":
        near = [machine.cores for machine in resources.machines if machine.devices]
        away = resources.cores - sum(near)  # cores of nodes that only simulate
        there = max(min(2 * len(near), sum(near)), sum(near) - max(0, config.placement.env_workers - away))
    wanted = config.placement.devices
    if wanted is not None and wanted > there:
        raise PlanError("placement.devices", f"there are {there} ({resources.kind}) to divide; use at most that many")
    return wanted or there


def choose_layout(config: RunConfig, resources: Resources) -> Layout:
    """The layout by ``placement.mode`` and the numbers of devices that it names; "auto" decides by rule.

    The rule: a single device is shared; more are divided evenly, unless ``placement.offload=always`` wants them shared.
    Raises PlanError if the mode needs more devices than there are.
    """
    p, devices = config.placement, usable_devices(config, resources)
    on_devices = simulator_on_devices(config, resources.kind)
    roles = ("simulators, " if on_devices else "") + "inference and learner"
    needed = 3 if on_devices else 2
    split = devices >= needed and p.offload != "always"
    mode: Mode = p.mode if p.mode != "auto" else ("pipelined" if split else "collocated")
    smallest = {"collocated": 1, "pipelined": needed, "hybrid": 2}[mode]
    if devices < smallest:
        there = f"there {'is' if devices == 1 else 'are'} {devices}"
        text = f"{mode} divides devices among {roles} and needs {smallest}, {there}; use collocated"
        raise PlanError("placement.mode", text)
    candidates = [
        layout
        for layout in layouts(devices, on_devices, mode)
        if p.simulator_devices in (None, len(layout.simulators))
        and p.inference_devices in (None, len(layout.inference))
    ]
    if not candidates:
        asked = f"simulator_devices={p.simulator_devices} and inference_devices={p.inference_devices}"
        text = f"{mode} cannot divide {devices} devices among {roles} with {asked}"
        raise PlanError("placement.mode", f"{text}; leave one to every role, or set them to null")
    share = devices / (needed if mode == "pipelined" else 2)
    return min(candidates, key=lambda x: abs(len(x.inference) - share) + abs(len(x.simulators) - share))
