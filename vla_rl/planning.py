"""The plan of a run, and `vla-rl plan`: what would run where, what it would use, and a picture of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vla_rl.config import RunConfig
from vla_rl.config_loading import load_config
from vla_rl.cost_model import Job
from vla_rl.machine import Machine
from vla_rl.placement import (
    Layout,
    Plan,
    Process,
    Resources,
    layouts,
    make_plan,
    simulator_on_devices,
    usable_devices,
)
from vla_rl.progress import make_console
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from vla_rl.planner import Candidate
    from vla_rl.profile import Profile


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
    from vla_rl.planner import search
    from vla_rl.profile import load_profile

    assert config.placement.profile is not None
    profile = load_profile(Path(config.placement.profile))
    job = job_of(config, spec, profile)
    mode = config.placement.mode
    return search(config, resources, profile, job, None if mode == "auto" else mode)


def job_of(config: RunConfig, spec: EnvSpec, profile: Profile) -> Job:
    """What the run asks of the machine, with episodes as long as the profile says."""
    return Job.of(config, spec.max_episode_steps, 2 * (1 - profile.mean_length))


def plan_command(args: Any) -> int:
    """Print the plan as a table, what was compared with it, and draw it."""
    from envs import env_spec

    config = load_config(args.config, args.overrides, Machine.detect())
    spec, console = env_spec(config.env), make_console()
    resources = Resources.of(Machine.detect(), config)
    record: dict[str, Any] = {
        "resources": {"cores": resources.cores, "devices": resources.devices, "kind": resources.kind}
    }
    if config.placement.profile is None:
        plan = make_plan(config, resources)
        console.print(
            "no placement.profile: chosen by rule; `vla-rl profile` measures one, configs/profiles has examples"
        )
    else:
        found = searched(config, spec, resources)
        plan = found[0].plan
        console.print(_comparison(found))
        record["candidates"] = [
            {
                "layout": c.layout.describe(),
                "bound_s": c.bound.seconds,
                "simulated_s": c.simulated,
                "limit": c.bound.limit,
            }
            for c in found
        ]
        if args.output:
            _draw(plan, config, spec, resources, args.output)
            console.print(str(args.output))
    console.print(plan_table(plan))
    if args.json:
        record["offload"] = plan.offload
        record["plan"] = [_row(p) for p in (*plan.workers, *plan.servers, *plan.learners)]
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def plan_table(plan: Plan) -> Table:
    """One row for processes that are alike."""
    offload = ", the learner's state and inference on shared devices one at a time" if plan.offload else ""
    table = Table(title=f"plan: {plan.layout.describe()}, batches of up to {plan.max_batch}{offload}")
    for name in ("processes", "role", "where", "device is", "threads", "slots in stages"):
        table.add_column(name)
    for processes in (plan.workers, plan.servers, plan.learners):
        if not processes:
            continue
        first = processes[0]
        devices = sorted({d for p in processes for d in p.devices})
        where = f"{first.kind} {', '.join(map(str, devices))}" if devices else "cores"
        nodes = len({p.node for p in processes})
        where += f" of {nodes} nodes" if plan.nodes > 1 else ""
        turns = "shared" if any(p.turns for p in processes) else "own"
        slots = f"{plan.slots} in {plan.stages}" if first.role == "env worker" else ""
        table.add_row(str(len(processes)), first.role, where, turns, str(first.threads), slots)
    return table


def _comparison(found: list[Candidate]) -> Table:
    table = Table(title="layouts compared; seconds a super-batch")
    for name in ("layout", "bound", "simulated", "limited by"):
        table.add_column(name, justify="left" if name in ("layout", "limited by") else "right")
    for c in found[:12]:
        table.add_row(c.layout.describe(), f"{c.bound.seconds:.3g}", f"{c.simulated or 0:.3g}", c.bound.limit)
    return table


def _row(process: Process) -> dict[str, Any]:
    return {
        "role": process.role,
        "index": process.index,
        "kind": process.kind,
        "devices": list(process.devices),
        "turns": process.turns,
        "threads": process.threads,
    }


def _draw(plan: Plan, config: RunConfig, spec: EnvSpec, resources: Resources, path: Path) -> None:
    from vla_rl.profile import load_profile
    from vla_rl.report import draw_timeline
    from vla_rl.simulation import SimulatedRun

    assert config.placement.profile is not None
    profile = load_profile(Path(config.placement.profile))
    job = job_of(config, spec, profile)
    run = SimulatedRun(plan, profile, job, resources.cores)
    run.run(warmup=job.max_age + 2, batches=2)
    title = f"{plan.layout.describe()}: two super-batches, simulated by {profile.name}"
    draw_timeline(run.activities, path, title)
