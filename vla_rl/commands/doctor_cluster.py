"""`vla-rl doctor --cluster ADDRESS`: what each node of a Ray cluster has, its link to the head, and what would stop a
run over these nodes."""

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from vla_rl.cluster.survey import Facts, Link, NodeReport, survey
from vla_rl.commands.doctor import Finding, as_records, is_ready, table_of
from vla_rl.core.ipc.shared_memory import enlarge
from vla_rl.core.machine import GIB

if TYPE_CHECKING:
    from rich.table import Table

_MBIT = 1e6 / 8
_LONG_ROUND_TRIP_S = 0.01
_LOW_RATE = 100 * _MBIT
_CLOCK_S = 1.0
_ALIKE = ("python", "ray", "torch")  # of other versions, processes do not understand each other
_COLUMNS = (  # heading, and its second line
    *(("cores", ""), ("GPUs", ""), ("memory", "GiB"), ("/dev/shm", "free/GiB"), ("disk", "free")),
    *(("clock", "s"), ("delay", "ms"), ("to head", "Mbit/s"), ("from it", "Mbit/s")),
)


def doctor_cluster_command(args: argparse.Namespace) -> int:
    """Print a table of the nodes, then what is wrong with them, and write both to ``args.json`` if given.

    Returns 0 if a run over all nodes can start, else 1. Raises UserError if the cluster cannot be joined.
    """
    from vla_rl.core.files import write_json
    from vla_rl.observability.console import make_console, say

    console = make_console()
    reports = survey(args.cluster, lambda text: say(console, text))
    findings = examine_nodes(reports)
    ready = is_ready(findings)
    if args.json is not None:
        nodes = [asdict(r) | {"facts": r.facts and asdict(r.facts) | {"folder": str(r.facts.folder)}} for r in reports]
        write_json(args.json, {"ready": ready, "nodes": nodes, "findings": as_records(findings)})
    console.print(table_of_nodes(reports))
    for line in _versions(reports):
        say(console, line)
    say(console, "clock: how far it is ahead of the head's; delay: a round trip to the head; rates: of Ray's objects")
    if findings:
        console.print(table_of(findings, "nodes"))
    console.print("A run can use these nodes." if ready else "A run would stop: fix what is marked as missing.")
    return 0 if ready else 1


def table_of_nodes(reports: Sequence[NodeReport]) -> "Table":
    """A row for each node, in 80 columns."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("node", overflow="fold")
    for heading, unit in _COLUMNS:
        table.add_column(f"{heading}\n{unit}", justify="right", no_wrap=True)
    for name, report in zip(_names(reports), reports, strict=True):
        cells = _of_facts(report) if report.facts is not None else ["", report.problem and "?"]
        link = [] if report.link is None else _of_link(report.link)
        table.add_row(escape(f"{name} (head)" if report.is_head else name), *cells, *link)
    return table


def _of_facts(report: NodeReport) -> list[str]:
    facts = report.facts
    assert facts is not None
    sizes = [f"{facts.memory / GIB:.0f}", "/".join(f"{size / GIB:.1f}" for size in facts.shared)]
    return [str(facts.cpus), str(report.gpus), *sizes, f"{facts.disk[0] / GIB:.1f}"]


def _of_link(link: Link) -> list[str]:
    rates = (f"{rate / _MBIT:.0f}" for rate in (link.to_head, link.from_head))
    return [f"{link.clock_s:+.3f}", f"{1000 * link.round_trip_s:.1f}", *rates]


def _names(reports: Sequence[NodeReport]) -> list[str]:
    """Host names; with addresses, where several nodes have the same."""
    count = Counter(report.name for report in reports)
    return [r.name if count[r.name] == 1 else f"{r.name} {r.address}" for r in reports]


def _versions(reports: Sequence[NodeReport]) -> Iterator[str]:
    """A line for each set of versions, with the nodes that have it."""
    nodes = defaultdict[str, list[str]](list)
    for name, report in zip(_names(reports), reports, strict=True):
        if report.facts is not None:
            found = {**report.facts.versions, "code": report.facts.code[:7]}
            nodes[", ".join(f"{package} {version}" for package, version in found.items())].append(name)
    for text, names in nodes.items():
        yield text if len(nodes) == 1 else f"{', '.join(names)}: {text}"


def examine_nodes(reports: Sequence[NodeReport]) -> list[Finding]:
    """What is wrong, what stops a run first. A finding's topic names all nodes that have it."""
    nodes = defaultdict[Finding, list[str]](list)
    known = [report for report in reports if report.facts is not None]
    for name, report in zip(_names(reports), reports, strict=True):
        for finding in _findings(report, known[0] if known else report, len(reports)):
            nodes[finding].append(name)
    named = [replace(finding, topic=", ".join(names)) for finding, names in nodes.items()]
    return sorted(named, key=lambda finding: finding.state != "missing")


def _findings(report: NodeReport, first: NodeReport, count: int) -> Iterator[Finding]:
    """Of one node of ``count``; ``first`` has facts, if any node has."""
    if report.problem:
        yield _missing(report.problem, report.remedy)
    facts, wanted = report.facts, first.facts
    if facts is None or wanted is None:
        return
    for package in _ALIKE:
        there, here = (f.versions.get(package, "missing") for f in (facts, wanted))
        if there != here:
            yield _missing(f"{package} {there}, not {here} as on {first.name}", "install the same version everywhere")
    if facts.code != wanted.code:
        yield _missing(f"other source files of vla_rl than on {first.name}", "install the same version everywhere")
    if facts.versions.get("mujoco") != wanted.versions.get("mujoco"):
        yield Finding("", f"another mujoco than on {first.name}", "needed alike for tasks that use it")
    if report.gpus < first.gpus:
        remedy = "let it only simulate (placement.env_hosts), or hide GPUs of the others (CUDA_VISIBLE_DEVICES)"
        yield _missing(f"{report.gpus} GPUs, {first.gpus} on {first.name}; this version runs on alike nodes", remedy)
    if report.gpus and facts.gpu_problem:
        yield _missing("torch cannot use its GPUs", facts.gpu_problem)
    if facts.cpus < wanted.cpus:
        remedy = "it will be the slowest: runs treat all nodes alike"
        yield Finding("", f"{facts.cpus} cores, {wanted.cpus} on {first.name}", remedy)
    yield from _room(facts)
    if count > 1 and facts.interface is None:
        remedy = "learner ranks cannot choose one: set GLOO_SOCKET_IFNAME before `ray start`"
        yield Finding("", f"no network interface has its address {report.address}", remedy)
    if report.link is not None:
        yield from _slowness(report.link)


def _room(facts: Facts) -> Iterator[Finding]:
    if facts.shared[0] < GIB:
        found = f"{facts.shared[0] / GIB:.1f} GiB free in /dev/shm"
        yield _missing(found, f"{enlarge(4 * GIB)}; `vla-rl plan CONFIG` shows what a run needs")
    if facts.memory < 8 * GIB:
        yield Finding("", f"{facts.memory / GIB:.1f} GiB of memory", "lower placement.env_workers")
    if facts.disk[0] < 5 * GIB:
        remedy = "checkpoints pass through it where no disk is shared: free some, or set TMPDIR before `ray start`"
        yield Finding("", f"{facts.disk[0] / GIB:.1f} GiB free in {facts.folder}", remedy)


def _slowness(link: Link) -> Iterator[Finding]:
    ahead = abs(link.clock_s) - link.clock_error_s
    if ahead > _CLOCK_S:
        yield Finding("", f"its clock differs by {ahead:.0f} s or more", "traces mix up what came first: run chrony")
    if link.round_trip_s > _LONG_ROUND_TRIP_S:
        remedy = "learner ranks exchange gradients in every step: use nodes of one network"
        yield Finding("", f"a long way to the head: {1000 * link.round_trip_s:.0f} ms", remedy)
    if (rate := min(link.to_head, link.from_head)) < _LOW_RATE:
        remedy = "all trained weights cross it at each weight sync: train.publish_every=N makes that rarer"
        yield Finding("", f"a slow link to the head: {rate / _MBIT:.0f} Mbit/s", remedy)


def _missing(found: str, remedy: str) -> Finding:
    return Finding("", found, remedy, required=True)
