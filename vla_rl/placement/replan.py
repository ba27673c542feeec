"""Whether a run is better off with another plan, by the costs that it has measured itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.placement.cost_model import Job
from vla_rl.placement.measured_profile import Costs, Measured
from vla_rl.placement.plan import Plan, Resources
from vla_rl.placement.planner import job_of
from vla_rl.placement.profile import Profile
from vla_rl.placement.search import Candidate, candidate_of, search, simulate

# A move costs the start of all processes, and a simulation is some percent off (docs/placement.md): a smaller gain may
# be none, and a run must not move to and fro.
_WORTH = 0.9  # expected seconds with another plan, as a share of those with the current one


@dataclass(frozen=True, slots=True)
class Move:
    """From one plan to a better one; both simulated by the same profile."""

    before: Candidate
    after: Candidate

    @property
    def plan(self) -> Plan:
        return self.after.plan

    def text(self) -> str:
        (old, old_s), (new, new_s) = map(_described, (self.before, self.after))
        return f"moving from {old} to {new}: {new_s:.3g} s a super-batch are expected instead of {old_s:.3g}"

    def record(self) -> dict[str, Any]:
        """For a log; seconds a super-batch."""
        (old, old_s), (new, new_s) = map(_described, (self.before, self.after))
        return {"from": old, "from_s": old_s, "to": new, "to_s": new_s}


def look(costs: Costs, measured: Measured, config: RunConfig, spec: EnvSpec, current: Plan) -> Move | None:
    """The move that is worth it by what was measured since the last look; None also where that is too little.

    Raises PlanError as ``better_plan``.
    """
    sums = costs.look()
    if sums is None:
        return None
    profile = measured.profile(sums)
    return better_plan(config, Resources.of(Machine.detect(), config), profile, job_of(config, spec, profile), current)


def better_plan(config: RunConfig, resources: Resources, profile: Profile, job: Job, current: Plan) -> Move | None:
    """The move that is worth it, if there is one.

    Raises PlanError where by this profile no plan fits into memory.
    """
    ranks = None if _any_ranks(config) else len(current.learners)
    now = simulate(candidate_of(current, profile, job, resources.cores), profile, job, resources.cores)
    return worthwhile(now, search(config, resources, profile, job, ranks=ranks))


def worthwhile(now: Candidate, found: Sequence[Candidate]) -> Move | None:
    """The move to the fastest of the simulated candidates, where that gains enough."""
    best = min(found, key=lambda c: c.simulated or 0.0)
    assert now.simulated is not None
    assert best.simulated is not None
    return Move(now, best) if best.simulated <= _WORTH * now.simulated else None


def _any_ranks(config: RunConfig) -> bool:
    """Whether another number of ranks can continue a learner's state: under ZeRO, DeepSpeed saves a part for each."""
    return config.learner.zero_stage == 0 or config.placement.virtual is not None  # virtual learners have no state


def _described(candidate: Candidate) -> tuple[str, float]:
    offload = ", one at a time on shared devices" if candidate.plan.offload else ""
    return candidate.layout.describe() + offload, candidate.simulated or 0.0
