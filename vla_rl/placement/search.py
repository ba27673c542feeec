"""Search for the best layout by a profile: all splits of all modes, by memory, by bound, then by simulation.

all layouts ──▶ those that fit into memory ──▶ sorted by bound ──▶ the first few simulated ──▶ the fastest
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from vla_rl.config.run_config import RunConfig
from vla_rl.placement.cost_model import Bound, bound
from vla_rl.placement.layouts import layouts, simulator_on_devices, usable_devices
from vla_rl.placement.memory import fit_memory
from vla_rl.placement.plan import Layout, Mode, Plan, PlanError
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import Profile
from vla_rl.placement.resources import Resources
from vla_rl.placement.simulation import SimulatedRun
from vla_rl.placement.workload import Workload

_WITHIN = 1.25  # a layout whose bound is this many times the best one is not worth a simulation ...
_AT_LEAST = 4  # ... unless fewer than this many would be simulated
_DEVICES_AT_MOST = 256  # over all simulations of a search, whose time is proportional to devices
_ALIKE = 1.01  # simulated times within this factor are equal
_BATCHES = 4  # measured in a simulation


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
    simulated = sorted((simulate(c, profile, workload) for c in found[:number]), key=_expected)
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
            plan = fit_memory(make_plan(config, resources, layout), profile.memory, config)
        except PlanError as error:
            refused.append(error)
            continue
        if ranks in (None, len(plan.learners)):
            found.append(candidate_of(plan, profile, workload))
    if not found:
        raise refused[0] if refused else PlanError("placement.mode", f"{mode} needs more devices than there are")
    return sorted(found, key=_expected)


def candidate_of(plan: Plan, profile: Profile, workload: Workload) -> Candidate:
    """Any plan, with its bound."""
    return Candidate(plan, bound(plan, profile, workload))


def simulate(candidate: Candidate, profile: Profile, workload: Workload) -> Candidate:
    """The candidate with its simulated time."""
    return replace(candidate, simulated=_simulated_seconds(candidate.plan, profile, workload))


@lru_cache(maxsize=1024)  # a search of all modes repeats the simulations of a search of one
def _simulated_seconds(plan: Plan, profile: Profile, workload: Workload) -> float:
    warmup = workload.max_staleness + 3  # until everything played before the first update has been trained
    return 1.0 / SimulatedRun(plan, profile, workload).run(warmup, _BATCHES).batches_per_s


def _expected(candidate: Candidate) -> float:
    """Seconds per super-batch: simulated, or else the bound."""
    return candidate.simulated or candidate.bound.seconds


def _busiest_device(candidate: Candidate) -> float:
    use = candidate.bound.use
    return max(seconds for name, seconds in use.items() if name.startswith("device") or name == "world model")
