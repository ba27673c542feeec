"""The plan with which a run starts, or with which it continues from a checkpoint."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.placement.cost_model import Workload
from vla_rl.placement.host_memory import host_problem
from vla_rl.placement.memory import expected_memory, fit_memory
from vla_rl.placement.plan import Layout, Plan, Resources, layouts, make_plan, simulator_on_devices, usable_devices
from vla_rl.placement.profile import Profile, load_profile
from vla_rl.placement.search import Candidate, search


def plan_run(config: RunConfig, spec: EnvSpec, *, training: bool = True) -> Plan:
    """The plan with which a run starts: the best by ``placement.profile``, or by rule without one.

    Raises PlanError if no plan fits.
    """
    machine = Machine.detect()
    if config.placement.profile is None or not training:
        return plan_by_rule(config, spec, machine, training=training)
    return search_by_profile(config, spec, machine)[0].plan


def plan_by_rule(config: RunConfig, spec: EnvSpec, machine: Machine, *, training: bool = True) -> Plan:
    """The plan without a profile. Raises PlanError if it does not fit."""
    memory = expected_memory(config, spec, machine)
    plan = fit_memory(make_plan(config, Resources.of(machine, config), training=training), memory, config)
    if problem := host_problem(plan, memory, config, spec, machine):
        raise problem
    return plan


def search_by_profile(config: RunConfig, spec: EnvSpec, machine: Machine) -> list[Candidate]:
    """The best layouts of the configured mode by ``placement.profile``, the fastest first. Raises PlanError."""
    profile = profile_of(config, spec, machine)
    mode = None if config.placement.mode == "auto" else config.placement.mode
    found = search(config, Resources.of(machine, config), profile, workload_of(config, spec, profile), mode)
    problems = [host_problem(c.plan, profile.memory, config, spec, machine) for c in found]
    if fitting := [c for c, problem in zip(found, problems, strict=True) if problem is None]:
        return fitting
    assert problems[0] is not None
    raise problems[0]


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
    return Workload.of(config, spec.max_episode_steps, 2 * (1 - profile.mean_length))


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
