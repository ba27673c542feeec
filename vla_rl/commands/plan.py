"""`vla-rl plan`: what would run where, the layouts that were compared, and a picture of devices over time."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from envs import env_spec
from vla_rl.config.run_config import RunConfig
from vla_rl.core.files import write_json
from vla_rl.core.ipc.shared_memory import free_shared_memory
from vla_rl.core.machine import GIB, Machine
from vla_rl.core.records import EnvSpec
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import draw_timeline
from vla_rl.placement.checks import load_checked_config
from vla_rl.placement.plan import Plan, Resources, make_plan
from vla_rl.placement.planner import search_by_profile, workload_of
from vla_rl.placement.profile import load_profile
from vla_rl.placement.search import Candidate
from vla_rl.placement.shared_memory import SharedMemoryNeeds
from vla_rl.placement.simulation import SimulatedRun


def plan_command(args: Any) -> int:
    """Print the plan and what it was compared with, draw it, and write it as JSON."""
    config = load_checked_config(args.config, args.overrides)
    spec, console, resources = env_spec(config.env), make_console(), Resources.of(Machine.detect(), config)
    record: dict[str, Any] = {"resources": asdict(resources)}
    if config.placement.profile is None:
        plan = make_plan(config, resources)
        console.print(
            "no placement.profile: chosen by rule; `vla-rl profile` measures one, configs/profiles has examples"
        )
    else:
        found = search_by_profile(config, spec, resources)
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
    needs = SharedMemoryNeeds.of(config, spec, plan)
    console.print(f"shared memory: needs {needs.describe()}; free here: {free_shared_memory() / GIB:.1f} GiB")
    if args.json:
        write_json(
            args.json,
            record
            | {"offload": plan.offload, "shared_memory": asdict(needs), "plan": [asdict(p) for p in plan.processes]},
        )
    return 0


def plan_table(plan: Plan) -> Table:
    """One row for each role."""
    offload = ", with offloading on shared devices" if plan.offload else ""
    table = Table(title=f"plan: {plan.layout.describe()}, batches of up to {plan.max_batch}{offload}")
    for name in ("processes", "role", "where", "device is", "threads", "envs in splits"):
        table.add_column(name)
    for processes in (plan.workers, plan.servers, plan.learners):
        if not processes:
            continue
        first = processes[0]
        devices = sorted({d for p in processes for d in p.devices})
        where = f"{first.kind} {', '.join(map(str, devices))}" if devices else "cores"
        nodes = len({p.node for p in processes})
        where += f" of {nodes} nodes" if plan.nodes > 1 else ""
        sharing = "shared" if any(p.lock for p in processes) else "own"
        envs = f"{plan.envs_per_worker} in {plan.splits}" if first.role == "env worker" else ""
        table.add_row(str(len(processes)), first.role, where, sharing, str(first.threads), envs)
    return table


def _comparison(found: list[Candidate]) -> Table:
    table = Table(title="layouts compared; seconds per super-batch")
    for name in ("layout", "bound", "simulated", "limited by"):
        table.add_column(name, justify="left" if name in ("layout", "limited by") else "right")
    for c in found[:12]:
        table.add_row(c.layout.describe(), f"{c.bound.seconds:.3g}", f"{c.simulated or 0:.3g}", c.bound.limit)
    return table


def _draw(plan: Plan, config: RunConfig, spec: EnvSpec, resources: Resources, path: Path) -> None:
    assert config.placement.profile is not None
    profile = load_profile(Path(config.placement.profile))
    workload = workload_of(config, spec, profile)
    run = SimulatedRun(plan, profile, workload, resources.cores)
    run.run(warmup=workload.max_staleness + 2, batches=2)
    draw_timeline(run.activities, path, f"{plan.layout.describe()}: two super-batches, simulated by {profile.name}")
