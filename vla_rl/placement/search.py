"""Which layout is best, by a profile: every split of every mode, its memory, its bound, and a simulation of the best.

all layouts ──▶ those that fit into memory ──▶ by their bound ──▶ the first few simulated ──▶ the fastest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from vla_rl.config.run_config import RunConfig
from vla_rl.placement.cost_model import Bound, Job, bound
from vla_rl.placement.plan import (
    Layout,
    Mode,
    Plan,
    PlanError,
    Resources,
    layouts,
    lender_of,
    make_plan,
    simulator_on_devices,
    usable_devices,
)
from vla_rl.placement.profile import Profile
from vla_rl.placement.simulation import SimulatedRun

_WITHIN = 1.25  # a layout whose bound is this much worse than the best one's is not worth a simulation ...
_AT_LEAST = 4  # ... unless there are fewer than this many
_DEVICES_AT_MOST = 256  # in all simulations of a search together: they take time in proportion
_ALIKE = 1.01  # simulated times this near do not say which is shorter
_BATCHES = 4  # measured in a simulation
_WEIGHT_SHARE = {"fp32": 4 / 12, "bf16": 2 / 14}  # of ``Memory.trained``: a weight beside its gradient and moments


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and what is to be expected of it; seconds a super-batch."""

    plan: Plan
    bound: Bound
    simulated: float | None = None

    @property
    def layout(self) -> Layout:
        return self.plan.layout


def candidates(
    config: RunConfig, resources: Resources, profile: Profile, job: Job, mode: Mode | None, ranks: int | None = None
) -> list[Candidate]:
    """All plans that fit into memory, of all modes or one, the best bound first. ``ranks``: only those with as many
    learners.

    Raises PlanError, with the arithmetic of the memory, where none fits.
    """
    found, refused = [], []
    for layout in layouts(usable_devices(config, resources), simulator_on_devices(config, resources.kind), mode):
        try:
            plan = fit_memory(make_plan(config, resources, layout), profile, config)
        except PlanError as error:
            refused.append(error)
            continue
        if ranks in (None, len(plan.learners)):
            found.append(candidate_of(plan, profile, job, resources.cores))
    if not found:
        raise refused[0] if refused else PlanError("placement.mode", f"{mode} needs more devices than there are")
    return sorted(found, key=_expected)


def candidate_of(plan: Plan, profile: Profile, job: Job, cores: int) -> Candidate:
    """Any plan, with its bound."""
    return Candidate(plan, bound(plan, profile, job, cores))


def _expected(candidate: Candidate) -> float:
    """Seconds of a super-batch, as far as is known."""
    return candidate.simulated or candidate.bound.seconds


def _busiest_device(candidate: Candidate) -> float:
    return max(seconds for name, seconds in candidate.bound.use.items() if name != "cores")


def simulate(candidate: Candidate, profile: Profile, job: Job, cores: int) -> Candidate:
    """The candidate with its simulated time."""
    return replace(candidate, simulated=_simulated_seconds(candidate.plan, profile, job, cores))


@lru_cache(maxsize=1024)  # a search of all modes meets what a search of one has simulated
def _simulated_seconds(plan: Plan, profile: Profile, job: Job, cores: int) -> float:
    warmup = job.max_age + 3  # until what was played before the first update has been trained
    return 1.0 / SimulatedRun(plan, profile, job, cores).run(warmup, _BATCHES).batches_per_s


def search(
    config: RunConfig,
    resources: Resources,
    profile: Profile,
    job: Job,
    mode: Mode | None = None,
    ranks: int | None = None,
) -> list[Candidate]:
    """The candidates whose bounds promise something, simulated, the fastest first; of those that are as fast, the one
    whose devices have most time to spare, for what no simulation knows."""
    found = candidates(config, resources, profile, job, mode, ranks)
    worth = [c for c in found if c.bound.seconds <= _WITHIN * found[0].bound.seconds]
    devices = usable_devices(config, resources)
    worth = found[: max(_AT_LEAST, min(len(worth), _DEVICES_AT_MOST // devices))]
    simulated = sorted((simulate(c, profile, job, resources.cores) for c in worth), key=_expected)
    alike = [c for c in simulated if _expected(c) <= _ALIKE * _expected(simulated[0])]
    first = min(alike, key=_busiest_device)
    return [first, *(c for c in simulated if c is not first)]


def fit_memory(plan: Plan, profile: Profile, config: RunConfig) -> Plan:
    """The plan, with inference and learner on the devices one at a time where they fit only so.

    Raises PlanError with the arithmetic where that does not help, or is not allowed.
    """
    for device in sorted({d for p in (*plan.workers, *plan.servers, *plan.learners) for d in p.devices}):
        parts, room = memory_of(plan, profile, config, device), profile.memory.device
        total = sum(parts.values())
        if total <= room:
            continue
        offloading = replace(plan, offload=True)
        in_turns = _at_once(memory_of(offloading, profile, config, device))
        sizes = " + ".join(f"{name} {size:.1f}" for name, size in parts.items())
        text = f"{plan.layout.describe()}: device {device} has {room:.0f} GiB and would hold {sizes} = {total:.1f} GiB"
        host = "cpu" in {p.kind for p in plan.learners}  # whose memory is where things would go
        if host or in_turns > room:
            raise PlanError("placement.mode", text + _memory_remedy(parts, room))
        if config.placement.offload == "never":
            raise PlanError("placement.offload", f"{text}; never leaves it at that, auto lets them in one at a time")
        plan = offloading
    return plan


def _at_once(parts: dict[str, float]) -> float:
    """GiB where inference and learner are never there at the same time; simulators always are."""
    return sum(parts.values()) - min(parts.get("inference", 0.0), parts.get("learner", 0.0))


def memory_of(plan: Plan, profile: Profile, config: RunConfig, device: int) -> dict[str, float]:
    """GiB that each role holds on a device."""
    memory, ranks = profile.memory, max(1, len(plan.learners))
    roles: dict[str, Sequence[int]] = {
        "simulator": plan.layout.simulators,
        "inference": plan.layout.inference,
        "learner": plan.layout.learner if plan.learners else (),
    }
    sharded = memory.trained / ranks if config.learner.zero_stage else memory.trained
    weights = memory.weights / ranks if config.learner.zero_stage == 3 else memory.weights
    acting = memory.weights
    if any(device in s.devices and lender_of(config, plan, s) is not None for s in plan.servers):
        acting = memory.trained * _WEIGHT_SHARE[config.learner.precision]  # the frozen ones are the learner's
    sizes = {
        "simulator": memory.simulate_fixed + memory.simulate_each * plan.slots,
        "inference": acting + memory.infer_each * plan.max_batch,
        "learner": weights + sharded + memory.train_each * config.learner.micro_batch,
    }
    return {name: sizes[name] for name, devices in roles.items() if device in devices}


def _memory_remedy(parts: dict[str, float], room: float) -> str:
    largest = max(parts, key=lambda name: parts[name])
    if largest == "learner" and parts[largest] > room:
        return "; shard its state over more devices with learner.zero_stage=2 or 3, or lower learner.micro_batch"
    if largest == "simulator":
        return "; lower placement.slots_per_worker"
    return "; lower placement.max_batch or learner.micro_batch, or use more devices"
