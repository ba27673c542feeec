"""What limits a plan, and where its costs come from, each in one sentence."""

from vla_rl.placement.plan import Plan
from vla_rl.placement.profile import Profile
from vla_rl.placement.search import Candidate
from vla_rl.placement.workload import Workload

_SATURATED = 0.85  # share of the time: a resource that is in use so long leaves little to gain elsewhere


def chunks_per_s(candidate: Candidate, workload: Workload) -> float:
    """Chunks of new real episodes: simulated, or by the bound if the candidate was not simulated."""
    return workload.chunks / (candidate.simulated or candidate.bound.seconds)


def bottleneck(candidate: Candidate, workload: Workload) -> str:
    """A sentence: which resource is in use almost always, or that the bound on staleness keeps environments idle."""
    plan, bound = candidate.plan, candidate.bound
    share = min(1.0, bound.seconds / (candidate.simulated or bound.seconds))
    what, remedy = _resource(plan, bound.limit)
    if share >= _SATURATED:
        return f"bottleneck: {what}, in use for {100 * share:.0f} % of the time; {remedy}"
    envs, allowed = len(plan.workers) * plan.envs_per_worker, (workload.max_staleness + 1) * workload.episodes
    if allowed < envs:
        text = f"bottleneck: the bound on staleness, which lets {allowed} of {envs} environments play at once"
        return f"{text}; raise train.batch_episodes or train.max_staleness"
    return f"bottleneck: none alone; {what}, the busiest, is in use for {100 * share:.0f} % of the time"


def _resource(plan: Plan, name: str) -> tuple[str, str]:
    """(what it does, what would make it faster), by its name in a bound."""
    if name.startswith("device"):
        layout, device = plan.layout, int(name.split()[1])
        parts = {"simulation": layout.simulators, "inference": layout.inference, "learner": layout.learner}
        roles = [role for role, devices in parts.items() if device in devices]
        return f"{' and '.join(roles)} on {name}", "more devices would help, more cores would not"
    if name.startswith("link"):
        return f"the {name}", "a faster link would help, or a smaller env.image_size"
    return {
        "cores": ("simulation on the cores of nodes with inference", "more cores would help, or hosts without a GPU"),
        "remote cores": ("simulation on hosts without inference", "more hosts would help"),
        "world model": ("the world model", "a smaller world_model.branches would help"),
    }[name]


def costs_text(profile: Profile, plan: Plan) -> str:
    """The profile's name, and which of its costs nobody has measured."""
    drawing = ("render_on_cores, as render",) if plan.remote and profile.render_on_cores is None else ()
    assumed = ", ".join((*profile.assumed, *drawing))
    return f"costs: {profile.name}; {f'assumed, not measured: {assumed}' if assumed else 'all measured'}"
