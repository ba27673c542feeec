"""Search for the best layout by a profile: all splits of all modes, by memory, by bound, then by simulation.

all layouts ──▶ those that fit into memory ──▶ sorted by bound ──▶ the first few simulated ──▶ the fastest
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from vla_rl.config.run_config import RunConfig
from vla_rl.placement.cost_model import Bound, Workload, bound
from vla_rl.placement.plan import (
    Layout,
    Mode,
    Plan,
    PlanError,
    Resources,
    draws_on_devices,
    layouts,
    make_plan,
    sharing_learner,
    simulator_on_devices,
    usable_devices,
)
from vla_rl.placement.profile import Profile
from vla_rl.placement.simulation import SimulatedRun

_WITHIN = 1.25  # a layout whose bound is this many times the best one is not worth a simulation ...
_AT_LEAST = 4  # ... unless fewer than this many would be simulated
_DEVICES_AT_MOST = 256  # over all simulations of a search, whose time is proportional to devices
_ALIKE = 1.01  # simulated times within this factor are equal
_BATCHES = 4  # measured in a simulation
_WEIGHT_SHARE = {"fp32": 4 / 12, "bf16": 2 / 14}  # of ``Memory.trained``: a weight relative to its gradient and moments


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what to expect of it; seconds per super-batch."""

    plan: Plan
    bound: Bound
    simulated: float | None = None

    @property
    def layout(self) -> Layout:
        return self.plan.layout


def search(
    config: RunConfig,
    resources: Resources,
    profile: Profile,
    workload: Workload,
    mode: Mode | None = None,
    ranks: int | None = None,
) -> list[Candidate]:
    """Simulate the best-bounded candidates, and sort them by simulated time.

    Ties for the first place go to the candidate whose busiest device has most slack, for what no simulation knows.
    ``mode``, ``ranks`` and PlanError: as of ``candidates``.
    """
    found = candidates(config, resources, profile, workload, mode, ranks)
    worth = sum(c.bound.seconds <= _WITHIN * found[0].bound.seconds for c in found)
    number = max(_AT_LEAST, min(worth, _DEVICES_AT_MOST // usable_devices(config, resources)))
    simulated = sorted((simulate(c, profile, workload, resources.cores) for c in found[:number]), key=_expected)
    alike = [c for c in simulated if _expected(c) <= _ALIKE * _expected(simulated[0])]
    first = min(alike, key=_busiest_device)
    return [first, *(c for c in simulated if c is not first)]


def candidates(
    config: RunConfig,
    resources: Resources,
    profile: Profile,
    workload: Workload,
    mode: Mode | None,
    ranks: int | None = None,
) -> list[Candidate]:
    """All plans that fit into memory, of one mode or all, the best bound first.

    ``ranks``: only plans with this number of learners. Raises PlanError, with the arithmetic, if nothing fits.
    """
    found, refused = [], []
    for layout in layouts(usable_devices(config, resources), simulator_on_devices(config, resources.kind), mode):
        try:
            plan = fit_memory(make_plan(config, resources, layout), profile, config)
        except PlanError as error:
            refused.append(error)
            continue
        if ranks in (None, len(plan.learners)):
            found.append(candidate_of(plan, profile, workload, resources.cores))
    if not found:
        raise refused[0] if refused else PlanError("placement.mode", f"{mode} needs more devices than there are")
    return sorted(found, key=_expected)


def candidate_of(plan: Plan, profile: Profile, workload: Workload, cores: int) -> Candidate:
    """Any plan, with its bound."""
    return Candidate(plan, bound(plan, profile, workload, cores))


def simulate(candidate: Candidate, profile: Profile, workload: Workload, cores: int) -> Candidate:
    """The candidate with its simulated time."""
    return replace(candidate, simulated=_simulated_seconds(candidate.plan, profile, workload, cores))


@lru_cache(maxsize=1024)  # a search of all modes repeats the simulations of a search of one
def _simulated_seconds(plan: Plan, profile: Profile, workload: Workload, cores: int) -> float:
    warmup = workload.max_staleness + 3  # until everything played before the first update has been trained
    return 1.0 / SimulatedRun(plan, profile, workload, cores).run(warmup, _BATCHES).batches_per_s


def _expected(candidate: Candidate) -> float:
    """Seconds per super-batch: simulated, or else the bound."""
    return candidate.simulated or candidate.bound.seconds


def _busiest_device(candidate: Candidate) -> float:
    return max(seconds for name, seconds in candidate.bound.use.items() if name != "cores")


def fit_memory(plan: Plan, profile: Profile, config: RunConfig) -> Plan:
    """The plan; with offloading if inference and learner fit on a shared device only one at a time.

    Raises PlanError, with the arithmetic, if that does not help or is not allowed.
    """
    room = profile.memory.device
    for device in sorted({d for p in plan.processes for d in p.devices}):
        parts = memory_use(plan, profile, config, device)
        total = sum(parts.values())
        if total <= room:
            continue
        offloading = replace(plan, offload=True)
        separate = memory_use(offloading, profile, config, device)
        at_once = sum(separate.values()) - min(separate.get("inference", 0.0), separate.get("learner", 0.0))
        sizes = " + ".join(f"{name} {size:.1f}" for name, size in parts.items())
        text = f"{plan.layout.describe()}: device {device} has {room:.0f} GiB and would hold {sizes} = {total:.1f} GiB"
        host = "cpu" in {p.kind for p in plan.learners}  # offloading would move things to the same memory
        if host or at_once > room:
            raise PlanError("placement.mode", text + _memory_remedy(parts, room))
        if config.placement.offload == "never":
            raise PlanError("placement.offload", f"{text}; never forbids offloading, use auto")
        plan = offloading
    return plan


def memory_use(plan: Plan, profile: Profile, config: RunConfig, device: int) -> dict[str, float]:
    """GiB that each role holds on a device."""
    memory, ranks, layout = profile.memory, max(1, len(plan.learners)), plan.layout
    sharded = memory.trained / ranks if config.learner.zero_stage else memory.trained
    weights = memory.weights / ranks if config.learner.zero_stage == 3 else memory.weights
    acting = memory.weights
    if any(device in s.devices and sharing_learner(config, plan, s) is not None for s in plan.servers):
        acting = memory.trained * _WEIGHT_SHARE[config.learner.precision]  # the frozen weights are the learner's
    simulator = memory.simulate_fixed + memory.simulate_each * plan.envs_per_worker
    roles = {
        "simulator": (layout.simulators, simulator),
        "inference": (layout.inference, acting + memory.infer_each * plan.max_batch),
        "learner": (
            layout.learner if plan.learners else (),
            weights + sharded + memory.train_each * config.learner.micro_batch,
        ),
    }
    held = {name: size for name, (devices, size) in roles.items() if device in devices}
    if memory.draw_each and draws_on_devices(config, plan.servers[0].kind):
        held["drawing"] = memory.draw_each * sum(plan.drawing_device(worker) == device for worker in plan.workers)
    return held


def _memory_remedy(parts: dict[str, float], room: float) -> str:
    largest = max(parts, key=lambda name: parts[name])
    if largest == "learner" and parts[largest] > room:
        return "; shard its state over more devices with learner.zero_stage=2 or 3, or lower learner.micro_batch"
    if largest == "drawing":
        return "; lower placement.env_workers, or let them draw on the cores (MUJOCO_GL=osmesa)"
    if largest == "simulator":
        return "; lower placement.envs_per_worker"
    return "; lower placement.max_batch or learner.micro_batch, or use more devices"
