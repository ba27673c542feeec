"""The plan with which a run starts, or with which it continues from a checkpoint."""

import math
from bisect import bisect_left
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.placement.host_memory import host_problem
from vla_rl.placement.layouts import layouts, simulator_on_devices, usable_devices
from vla_rl.placement.memory import expected_memory, fit_memory
from vla_rl.placement.plan import Layout, Mode, Plan
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import Profile, load_profile
from vla_rl.placement.resources import Resources
from vla_rl.placement.search import Candidate, candidates, search
from vla_rl.placement.shared_memory import row_bytes
from vla_rl.placement.workload import Workload

_SPARE = 0.8  # cores in use for this share of what the busiest other resource is hold up next to nothing


def plan_run(config: RunConfig, spec: EnvSpec, *, training: bool = True) -> Plan:
    """The plan with which a run starts: the best by ``placement.profile``, or by rule without one.

    Raises PlanError if no plan fits.
    """
    machine = Machine.detect()
    resources = Resources.of(machine, config)
    if config.placement.profile is None or not training:
        return plan_by_rule(config, spec, machine, resources, training=training)
    return search_by_profile(config, spec, machine, resources)[0].plan


def plan_by_rule(
    config: RunConfig, spec: EnvSpec, machine: Machine, resources: Resources, *, training: bool = True
) -> Plan:
    """The plan without a profile. ``machine``: a node with devices. Raises PlanError if it does not fit."""
    memory = expected_memory(config, spec, machine)
    plan = fit_memory(make_plan(config, resources, training=training), memory, config)
    if problem := host_problem(plan, memory, config, spec):
        raise problem
    return plan


def search_by_profile(config: RunConfig, spec: EnvSpec, machine: Machine, resources: Resources) -> list[Candidate]:
    """The best layouts of the configured mode by ``placement.profile``, the fastest first. Raises PlanError.

    ``machine``: a node with devices.
    """
    profile = profile_of(config, spec, machine)
    found = search(config, resources, profile, workload_of(config, spec, profile), _mode(config))
    problems = [host_problem(c.plan, profile.memory, config, spec) for c in found]
    if fitting := [c for c, problem in zip(found, problems, strict=True) if problem is None]:
        return fitting
    assert problems[0] is not None
    raise problems[0]


def _mode(config: RunConfig) -> Mode | None:
    return None if config.placement.mode == "auto" else config.placement.mode


def with_env_workers(config: RunConfig, spec: EnvSpec, machine: Machine, resources: Resources) -> RunConfig:
    """The config with an env worker on each core that helps, by ``placement.profile``.

    These are the cores of nodes with devices, except two for each device, and those of the fewest other nodes with
    which cores no longer limit the best plan, by its bound. There are at most as many as episodes under way. If the
    plan without other nodes is faster in the simulation, they are left out: a core without a device draws slowly, and
    ``train.max_staleness`` may let few environments play at once. ``machine``: a node with devices. Raises PlanError
    if no plan fits.
    """
    profile = profile_of(config, spec, machine)
    workload = workload_of(config, spec, profile)
    near = sum(m.cores for m in resources.machines if m.devices) - 2 * resources.devices
    others = [m.cores for m in resources.machines if not m.devices]
    most = (workload.max_staleness + 1) * workload.episodes

    def using(hosts: int) -> RunConfig:
        workers = max(resources.devices, near) + sum(others[:hosts])
        return config.with_values({"placement.env_workers": min(most, workers)})

    def suffice(hosts: int) -> bool:
        use = candidates(using(hosts), resources, profile, workload, _mode(config))[0].bound.use
        cores = max((seconds for name, seconds in use.items() if name.endswith("cores")), default=0.0)
        return cores <= _SPARE * max(seconds for name, seconds in use.items() if not name.endswith("cores"))

    def seconds(hosts: int) -> float:
        return search(using(hosts), resources, profile, workload, _mode(config))[0].simulated or math.inf

    enough = bisect_left(range(len(others)), True, key=suffice)
    return using(min(0, enough, key=seconds))


def profile_of(config: RunConfig, spec: EnvSpec, machine: Machine) -> Profile:
    """``placement.profile``, with the memory of this run's policy on this machine instead of another one's."""
    assert config.placement.profile is not None
    profile = load_profile(Path(config.placement.profile))
    if config.placement.virtual is not None:
        return profile
    ours, simulator = expected_memory(config, spec, machine), ("simulate_fixed", "simulate_each", "draw_each")
    memory = ours.model_copy(update={name: getattr(profile.memory, name) for name in simulator})
    return profile.model_copy(update={"memory": memory})


def workload_of(config: RunConfig, spec: EnvSpec, profile: Profile) -> Workload:
    """What the run asks of the machine, with the episode lengths of the profile."""
    workload = Workload.of(config, spec.max_episode_steps, 2 * (1 - profile.mean_length))
    return replace(workload, row_bytes=row_bytes(config, spec))


def layout_record(plan: Plan) -> dict[str, Any]:
    """What a checkpoint keeps of a plan; the rest follows from the configuration."""
    return asdict(plan.layout) | {"offload": plan.offload}


def plan_of_record(config: RunConfig, record: dict[str, Any]) -> Plan | None:
    """The plan of a checkpoint; None if the devices that there are now cannot be divided that way."""
    resources = Resources.of(Machine.detect(), config)
    layout = Layout(record["mode"], *(tuple(record[role]) for role in ("simulators", "inference", "learner")))
    if layout not in layouts(usable_devices(config, resources), simulator_on_devices(config, resources.kind)):
        return None
    return replace(make_plan(config, resources, layout), offload=record["offload"])
