"""The plan of a run, and `vla-rl plan`: what would run where, what it would use, and a picture of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.observability.console import make_console
from vla_rl.placement.plan import Plan, Process, Resources, make_plan

if TYPE_CHECKING:
    from vla_rl.placement.search import Candidate
from vla_rl.placement.checks import machine_checks
from vla_rl.placement.planner import job_of, searched


def plan_command(args: Any) -> int:
    """Print the plan as a table, what was compared with it, and draw it."""
    from envs import env_spec

    config = load_config(args.config, args.overrides, machine_checks(Machine.detect()))
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
    from vla_rl.observability.plots import draw_timeline
    from vla_rl.placement.profile import load_profile
    from vla_rl.placement.simulation import SimulatedRun

    assert config.placement.profile is not None
    profile = load_profile(Path(config.placement.profile))
    job = job_of(config, spec, profile)
    run = SimulatedRun(plan, profile, job, resources.cores)
    run.run(warmup=job.max_age + 2, batches=2)
    title = f"{plan.layout.describe()}: two super-batches, simulated by {profile.name}"
    draw_timeline(run.activities, path, title)
