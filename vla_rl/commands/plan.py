"""`vla-rl plan`: what would run where, the layouts that were compared, and a picture of devices over time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
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
from vla_rl.placement.elsewhere import Site, elsewhere
from vla_rl.placement.explanation import bottleneck, chunks_per_s, costs_text
from vla_rl.placement.host_memory import host_use
from vla_rl.placement.memory import Parts, describe_memory, expected_memory, memory_use
from vla_rl.placement.plan import Plan
from vla_rl.placement.planner import plan_by_rule, profile_of, search_by_profile, workload_of
from vla_rl.placement.profile import Memory, Profile
from vla_rl.placement.resources import Resources
from vla_rl.placement.search import Candidate
from vla_rl.placement.shared_memory import SharedMemoryNeeds
from vla_rl.placement.simulation import forecast
from vla_rl.placement.workload import Workload


@dataclass(frozen=True, slots=True)
class _Choice:
    """A plan, why it was chosen, and what to expect of it."""

    plan: Plan
    memory: Memory
    why: tuple[Table | str, ...]
    expected: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)


def plan_command(args: Any) -> int:
    """Print the plan and what it was compared with, draw it, and write it as JSON."""
    site = _here(args) if args.on is None else elsewhere(args.on, args.config, args.overrides)
    config, spec, console = site.config, site.spec, make_console()
    choice = _by_rule(site) if config.placement.profile is None else _by_profile(site, args.output)
    plan, memory = choice.plan, choice.memory
    for shown in (*site.notes, *choice.why, plan_table(plan)):
        console.print(shown)
    use = {device: memory_use(plan, memory, config, device) for device in _devices(plan)}
    console.print(_memory_table(plan, use, memory.device))
    needs, nodes = SharedMemoryNeeds.of(config, spec, plan), list[dict[str, Parts]]()
    if config.placement.virtual is None:
        nodes = [host_use(plan, memory, config, spec, node) for node in range(plan.nodes)]
        for line in _main_memory(plan, nodes, "this machine" if args.on is None else "it"):
            console.print(line)
    free = f"; free here: {free_shared_memory() / GIB:.1f} GiB" if args.on is None else ""
    console.print(f"shared memory: needs {needs.describe()}{free}")
    for line in (*choice.expected, *_remarks(plan)):
        console.print(line)
    if args.json:
        record = {"resources": asdict(site.resources)} | choice.record
        record |= {"offload": plan.offload, "plan": [asdict(p) for p in plan.processes], "shared_memory": asdict(needs)}
        found = {"room": memory.device, "devices": use, "host": nodes[0] if nodes else {}, "nodes": nodes}
        write_json(args.json, record | {"memory_gib": found})
    return 0


def _here(args: Any) -> Site:
    config, machine = load_checked_config(args.config, args.overrides), Machine.detect()
    return Site(config, env_spec(config.env), machine, Resources.of(machine, config))


def _by_rule(site: Site) -> _Choice:
    text = "no placement.profile: chosen by rule; `vla-rl profile` measures one, configs/profiles has examples"
    plan = plan_by_rule(site.config, site.spec, site.machine, site.resources)
    return _Choice(plan, expected_memory(site.config, site.spec, site.machine), (text,))


def _by_profile(site: Site, output: Path | None) -> _Choice:
    """``output``: of a picture."""
    profile = profile_of(site.config, site.spec, site.machine)
    workload = workload_of(site.config, site.spec, profile)
    found = search_by_profile(site.config, site.spec, site.machine, site.resources)
    best, limit, rate = found[0], bottleneck(found[0], workload), chunks_per_s(found[0], workload)
    why: list[Table | str] = [costs_text(profile, best.plan), _comparison(found)]
    if output:
        _draw(best.plan, profile, workload, output)
        why.append(str(output))
    candidates = [
        {"layout": c.layout.describe(), "bound_s": c.bound.seconds, "simulated_s": c.simulated, "limit": c.bound.limit}
        for c in found
    ]
    predicted = f"predicted: {rate:.3g} chunks/s, a super-batch of {workload.chunks:.0f} in {best.simulated:.3g} s"
    record = {"candidates": candidates, "chunks_per_s": rate, "bottleneck": limit}
    return _Choice(best.plan, profile.memory, tuple(why), (predicted, limit), record)


def plan_table(plan: Plan) -> Table:
    """One row for each role."""
    offload = ", with offloading on shared devices" if plan.offload else ""
    table = Table(title=f"plan: {plan.layout.describe()}, batches of up to {plan.max_batch}{offload}")
    for name in ("processes", "role", "where", "device is", "threads", "envs in splits"):
        table.add_column(name)
    near = tuple(worker for worker in plan.workers if not worker.remote)
    for processes in (near, plan.remote, plan.servers, plan.learners):
        if not processes:
            continue
        first = processes[0]
        devices = sorted({d for p in processes for d in p.devices})
        where = f"{first.kind} {', '.join(map(str, devices))}" if devices else "cores"
        where += f" of {_nodes(p.node for p in processes)}" if plan.nodes > 1 else ""
        sharing = "shared" if any(p.lock for p in processes) else "own"
        envs = f"{plan.envs_per_worker} in {plan.splits}" if first.role == "env worker" else ""
        role = f"{first.role}, remote" if first.remote else first.role
        table.add_row(str(len(processes)), role, where, sharing, str(first.threads), envs)
    return table


def _remarks(plan: Plan) -> Iterator[str]:
    """What is to be said of a plan besides."""
    if idle := set(range(plan.nodes)) - {p.node for p in plan.processes}:
        yield f"not used: {_nodes(idle)}"
    if plan.remote:
        hosts = sum(not machine.devices for machine in plan.machines)
        keys = f"placement.nodes={plan.nodes - hosts} placement.env_hosts={hosts}"
        yield f"env workers of {_nodes(w.node for w in plan.remote)} ask over the network ({keys})"
    if plan.planned_only:
        yield plan.planned_only


def _nodes(numbers: Iterable[int]) -> str:
    """Such as ``node 0``, or ``nodes 1-4, 7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"node {text}" if text.isdigit() else f"nodes {text}"


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
    nodes = sum(machine.devices > 0 for machine in plan.machines)
    return devices[:nodes] if "cpu" in {p.kind for p in plan.processes if p.devices} else devices


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
        where = ", ".join(map(str, devices))
        where += f" of {_nodes(map(plan.node_of, devices))}" if plan.nodes > 1 else ""
        for role, parts in use[devices[0]].items():
            inside = ", ".join(f"{part} {size:.1f}" for part, size in parts.items())
            table.add_row(where, role, f"{sum(parts.values()):.1f}", inside)
    return table


def _main_memory(plan: Plan, use: Sequence[dict[str, Parts]], one: str) -> Iterator[str]:
    """A line for the nodes that hold the same in main memory. ``one``: what a single node is called."""
    alike: dict[str, list[int]] = {}
    for node, (roles, machine) in enumerate(zip(use, plan.machines, strict=True)):
        alike.setdefault(f"{roles} {machine.memory}", []).append(node)
    for nodes in alike.values():
        of, whose = (f" of {_nodes(nodes)}", "each") if plan.nodes > 1 else ("", one)
        room = plan.machines[nodes[0]].memory
        if not use[nodes[0]]:
            continue
        yield f"main memory{of}: {describe_memory(use[nodes[0]])} at least; {whose} has {room:.0f} GiB"


def _draw(plan: Plan, profile: Profile, workload: Workload, path: Path) -> None:
    spans = forecast(plan, profile, workload)
    draw_timeline([spans], path, f"{plan.layout.describe()}: two super-batches, simulated by {profile.name}")
