"""Replanning: whether a running run would be faster with another plan, by the costs that it has measured itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.placement.measured_profile import MeasuredCosts, ProfileBuilder
from vla_rl.placement.plan import Plan
from vla_rl.placement.planner import workload_of
from vla_rl.placement.profile import Memory, Profile
from vla_rl.placement.resources import Resources
from vla_rl.placement.search import Candidate, candidate_of, search, simulate
from vla_rl.placement.workload import Workload

# A migration costs the start of all processes, and simulations are a few percent off (docs/placement.md): a smaller
# gain may be none, and a run must not migrate back and forth.
_WORTH = 0.9  # expected seconds with another plan, as a share of those with the current one


@dataclass(frozen=True, slots=True)
class Migration:
    """From one plan to a better one; both simulated with the same profile."""

    before: Candidate
    after: Candidate

    @property
    def plan(self) -> Plan:
        return self.after.plan

    def text(self) -> str:
        (old, old_s), (new, new_s) = map(_described, (self.before, self.after))
        return f"migrating from {old} to {new}: {new_s:.3g} s per super-batch expected instead of {old_s:.3g}"

    def record(self) -> dict[str, Any]:
        """For a log; seconds per super-batch."""
        (old, old_s), (new, new_s) = map(_described, (self.before, self.after))
        return {"from": old, "from_s": old_s, "to": new, "to_s": new_s}


class Replanner:
    """Measures a run's costs while it runs, and proposes a migration when another plan is worth it.

    ``run`` and ``memory``: see ``ProfileBuilder``. ``state``: what ``state()`` returned, from a checkpoint.
    Raises UserError if ``placement.profile`` cannot be read.
    """

    def __init__(
        self, config: RunConfig, spec: EnvSpec, run: str, memory: Memory, state: Mapping[str, Any] | None = None
    ) -> None:
        self._config, self._spec = config, spec
        self._builder = ProfileBuilder(config, spec, run, memory)
        self._costs = MeasuredCosts(dict(state["costs"]) if state else {})  # of the whole run
        self._recent = MeasuredCosts()  # since the last search for a plan
        self.migrations: int = state["migrations"] if state else 0  # how many have been proposed so far

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {"migrations": self.migrations, "costs": self._costs.sums}

    def observe(self, growth: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
        """Add what the meters have grown by (``Throughput.growth``); call it every iteration."""
        self._costs.add(growth)
        self._recent.add(growth)

    def profile(self) -> Profile | None:
        """The profile of the whole run; None until simulator, inference and learner have all been seen."""
        return self._builder.profile(self._costs) if self._costs.complete else None

    def propose(self, policy_version: int, current: Plan) -> Migration | None:
        """The best migration by the costs since the last search; None if none is due or worth it.

        A search is due every ``placement.replan_every`` updates, and waits until all three activities have been seen.
        Raises PlanError if by the measured costs no plan fits into memory.
        """
        every = self._config.placement.replan_every
        if not every or policy_version % every or not self._recent.complete:
            return None
        profile, self._recent = self._builder.profile(self._recent), MeasuredCosts()
        resources = Resources.of(Machine.detect(), self._config)
        workload = workload_of(self._config, self._spec, profile)
        migration = better_plan(self._config, resources, profile, workload, current)
        self.migrations += migration is not None
        return migration


def better_plan(
    config: RunConfig, resources: Resources, profile: Profile, workload: Workload, current: Plan
) -> Migration | None:
    """The migration that is worth it, if there is one. Raises PlanError if by this profile no plan fits into memory."""
    # Under ZeRO, DeepSpeed saves one part of the learner's state per rank, so that their number has to stay.
    any_ranks = config.learner.zero_stage == 0 or config.placement.virtual is not None  # virtual learners have no state
    now = simulate(candidate_of(current, profile, workload), profile, workload)
    found = search(config, resources, profile, workload, ranks=None if any_ranks else len(current.learners))
    return worthwhile(now, found)


def worthwhile(now: Candidate, found: Sequence[Candidate]) -> Migration | None:
    """The migration to the fastest of the simulated candidates, if that gains enough."""
    best = min(found, key=lambda c: c.simulated or 0.0)
    assert now.simulated is not None
    assert best.simulated is not None
    return Migration(now, best) if best.simulated <= _WORTH * now.simulated else None


def _described(candidate: Candidate) -> tuple[str, float]:
    offload = ", one at a time on shared devices" if candidate.plan.offload else ""
    return candidate.layout.describe() + offload, candidate.simulated or 0.0
