"""The plan of a run, and `vla-rl plan`: what would run where, what it would use, and a picture of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.placement.cost_model import Job
from vla_rl.placement.plan import Layout, Plan, Resources, layouts, make_plan, simulator_on_devices, usable_devices

if TYPE_CHECKING:
    from vla_rl.placement.profile import Profile
    from vla_rl.placement.search import Candidate


def plan_run(config: RunConfig, spec: EnvSpec, *, training: bool = True) -> Plan:
    """The plan by which a run starts: searched for where a profile says what things cost, else by rule.

    Raises PlanError where nothing fits.
    """
    resources = Resources.of(Machine.detect(), config)
    if config.placement.profile is None or not training:
        return make_plan(config, resources, training=training)
    return searched(config, spec, resources)[0].plan


def layout_record(plan: Plan) -> dict[str, Any]:
    """What a checkpoint keeps of a plan; the rest follows from the configuration."""
    return asdict(plan.layout) | {"offload": plan.offload}


def plan_of_record(config: RunConfig, record: dict[str, Any]) -> Plan | None:
    """The plan of a checkpoint; None where the devices that there are now cannot be divided so."""
    resources = Resources.of(Machine.detect(), config)
    layout = Layout(record["mode"], *(tuple(record[role]) for role in ("simulators", "inference", "learner")))
    if layout not in layouts(usable_devices(config, resources), simulator_on_devices(config, resources.kind)):
        return None
    return replace(make_plan(config, resources, layout), offload=record["offload"])


def searched(config: RunConfig, spec: EnvSpec, resources: Resources) -> list[Candidate]:
    """All layouts of the configured mode that are worth it, the fastest first."""
    from vla_rl.placement.profile import load_profile
    from vla_rl.placement.search import search

    assert config.placement.profile is not None
    profile = load_profile(Path(config.placement.profile))
    job = job_of(config, spec, profile)
    mode = config.placement.mode
    return search(config, resources, profile, job, None if mode == "auto" else mode)


def job_of(config: RunConfig, spec: EnvSpec, profile: Profile) -> Job:
    """What the run asks of the machine, with episodes as long as the profile says."""
    return Job.of(config, spec.max_episode_steps, 2 * (1 - profile.mean_length))
