"""`vla-rl plan`: what would run where, the layouts that were compared, and a picture of devices over time."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from envs import env_spec
from vla_rl.core.files import write_json
from vla_rl.core.ipc.shared_memory import free_shared_memory
from vla_rl.core.machine import GIB, Machine
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import draw_timeline
from vla_rl.placement.checks import load_checked_config
from vla_rl.placement.cost_model import Workload
from vla_rl.placement.host_memory import host_use
from vla_rl.placement.memory import Parts, describe_memory, expected_memory, memory_use
from vla_rl.placement.plan import Plan, Resources
from vla_rl.placement.planner import plan_by_rule, profile_of, search_by_profile, workload_of
from vla_rl.placement.profile import Profile
from vla_rl.placement.search import Candidate
from vla_rl.placement.shared_memory import SharedMemoryNeeds
from vla_rl.placement.simulation import forecast


def plan_command(args: Any) -> int:
    """Print the plan and what it was compared with, draw it, and write it as JSON."""
    config, machine = load_checked_config(args.config, args.overrides), Machine.detect()
    spec, console, resources = env_spec(config.env), make_console(), Resources.of(machine, config)
    record: dict[str, Any] = {"resources": asdict(resources)}
    if config.placement.profile is None:
        memory = expected_memory(config, spec, machine)
        plan = plan_by_rule(config, spec, machine)
        console.print(
            "no placement.profile: chosen by rule; `vla-rl profile` measures one, configs/profiles has examples"
        )
    else:
        profile = profile_of(config, spec, machine)
        memory, found = profile.memory, search_by_profile(config, spec, machine)
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
            _draw(plan, profile, workload_of(config, spec, profile), resources, args.output)
            console.print(str(args.output))
    console.print(plan_table(plan))
    use = {device: memory_use(plan, memory, config, device) for device in _devices(plan)}
    console.print(_memory_table(plan, use, memory.device))
    needs = SharedMemoryNeeds.of(config, spec, plan)
    host: dict[str, Parts] = {}
    if config.placement.virtual is None:
        host = host_use(plan, memory, config, spec)
        room = f"this machine has {machine.memory / GIB:.0f} GiB"
        console.print(f"main memory: {describe_memory(host)} at least; {room}")
    console.print(f"shared memory: needs {needs.describe()}; free here: {free_shared_memory() / GIB:.1f} GiB")
    if args.json:
        record |= {"offload": plan.offload, "plan": [asdict(p) for p in plan.processes], "shared_memory": asdict(needs)}
        write_json(args.json, record | {"memory_gib": {"room": memory.device, "devices": use, "host": host}})
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


def _devices(plan: Plan) -> list[int]:
    """All devices; cores of one node have one memory, and count once."""
    devices = sorted({d for p in plan.processes for d in p.devices})
    return devices[: plan.nodes] if "cpu" in {p.kind for p in plan.processes if p.devices} else devices


def _memory_table(plan: Plan, use: dict[int, dict[str, Parts]], room: float) -> Table:
    """What each role holds at its peak; devices that hold the same are one row for each role."""
    alike: dict[str, list[int]] = {}
    for device, roles in use.items():
        alike.setdefault(repr(roles), []).append(device)
    one_at_a_time = ", inference and learner one at a time" if plan.offload else ""
    table = Table(title=f"memory of a device, {room:.0f} GiB{one_at_a_time}")
    for name in ("devices", "role", "GiB", "of which"):
        table.add_column(name, justify="right" if name == "GiB" else "left")
    for devices in alike.values():
        for role, parts in use[devices[0]].items():
            inside = ", ".join(f"{part} {size:.1f}" for part, size in parts.items())
            table.add_row(", ".join(map(str, devices)), role, f"{sum(parts.values()):.1f}", inside)
    return table


def _draw(plan: Plan, profile: Profile, workload: Workload, resources: Resources, path: Path) -> None:
    spans = forecast(plan, profile, workload, resources.cores)
    draw_timeline([spans], path, f"{plan.layout.describe()}: two super-batches, simulated by {profile.name}")
