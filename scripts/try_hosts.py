"""The same training run on one host and over several, out of Linux namespaces: does it learn alike, and how fast is it?

    python scripts/try_hosts.py CONFIG [KEY=VALUE ...] [--hosts 3] [--seeds 1,2,3] [--links 0,10,50,100mbit]
                                [--iterations N] [--keep FOLDER] [--json FILE]

Needs root (tests/hosts). "one host": env workers are on the learner's host, and ask by shared memory. Otherwise they
are on the other hosts (placement.env_hosts), which share no disk and no memory with the first. ``--links`` names
their cables: milliseconds of a round trip, or a rate. All ways take turns, seed by seed. With ``--iterations`` runs are
short and without evaluations.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import ROOT
from tests.hosts.fleet import Fleet
from tests.hosts.network import Network, obstacle, shape_of
from vla_rl.commands.chaos.training_run import ledger
from vla_rl.commands.metadata import git_commit, machine_record
from vla_rl.core.files import write_json
from vla_rl.observability.metrics_file import read_records

ONE = "one host"
_WARM_UP = 2  # iterations whose speed says nothing
_RUN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A run. Rates are means after the first iterations."""

    way: str
    seed: int
    chunks_per_s: float
    cpu_ms: float  # processor time of the whole machine, for a trained chunk
    latency_ms: float  # the network's part of a request
    link_mbit: float  # what the other hosts sent, together, per second
    batch: float  # rows of an inference batch
    minutes: float
    episodes: int
    success: tuple[float, float] | None  # greedy: of the first and of the last evaluation
    missing: int


def measure(fleet: Fleet, way: str, seed: int, args: argparse.Namespace) -> Measured:
    """Train once. Raises CalledProcessError if the run fails."""
    values = [f"seed={seed}", "log.dir=/tmp/runs", "log.name=run", f"placement.ray_address={fleet.address}"]
    values.append(f"placement.env_hosts={0 if way == ONE else len(fleet.others)}")
    if args.iterations:
        values += [f"train.iterations={args.iterations}", "train.eval_episodes=0", "log.video=false"]
    if way != ONE:
        fleet.shape(**shape_of(way))
    sent = sum(host.sent_bytes() for host in fleet.others)
    fleet.head.run("vla-rl", "train", args.config, *args.overrides, *values, timeout=_RUN_S)
    sent = sum(host.sent_bytes() for host in fleet.others) - sent
    fleet.shape()
    run = fleet.head.path("/tmp/runs/run")
    records = read_records(run / "metrics.jsonl")
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / "metrics.jsonl", args.keep / f"{way.replace(' ', '_')}-seed{seed}.jsonl")
    shutil.rmtree(run)
    return _summary(way, seed, records, sent)


def _summary(way: str, seed: int, records: Sequence[Mapping[str, float]], sent: int) -> Measured:
    timed = [record for record in records if record["iteration"] > _WARM_UP]
    seconds = sum(record["time/iteration_s"] for record in timed)
    chunks = sum(record["rollout/chunks"] for record in timed)
    cores = sum(record["machine/cpu"] * record["time/iteration_s"] for record in timed) * (psutil.cpu_count() or 1)
    latencies = [record["network/latency_ms"] for record in timed if "network/latency_ms" in record]
    greedy = [record["eval/greedy_success"] for record in records if "eval/greedy_success" in record]
    return Measured(
        way=way,
        seed=seed,
        chunks_per_s=chunks / seconds,
        cpu_ms=1e3 * cores / chunks,
        latency_ms=median(latencies) if latencies else 0.0,
        link_mbit=8e-6 * sent / (records[-1]["time"] - records[0]["time"]),
        batch=median(record["throughput/inference_batch"] for record in timed),
        minutes=records[-1]["time/seconds"] / 60,
        episodes=int(records[-1]["episodes/trained"]),
        success=(greedy[0], greedy[-1]) if greedy else None,
        missing=ledger(dict(records[-1]))["missing"],
    )


def table(found: Sequence[Measured]) -> str:
    """In Markdown; medians over seeds, and all values of success."""
    lines = [
        "| way | chunks/s | | CPU ms a chunk | network, ms | hosts send, Mbit/s | batch | minutes | greedy success |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    ways = list(dict.fromkeys(one.way for one in found))
    of_way = {way: [one for one in found if one.way == way] for way in ways}
    for way in ways:
        runs = of_way[way]
        pairs = zip(of_way[ways[0]], runs, strict=False)
        ratio = median(run.chunks_per_s / first.chunks_per_s for first, run in pairs)

        def typical(name: str, runs: Sequence[Measured] = runs) -> float:
            return median(getattr(run, name) for run in runs)

        rates = f"{typical('chunks_per_s'):.1f} | {ratio:.2f} | {typical('cpu_ms'):.1f} | {typical('latency_ms'):.1f}"
        rest = f"{typical('link_mbit'):.1f} | {typical('batch'):.1f} | {typical('minutes'):.1f}"
        success = ", ".join(f"{100 * run.success[0]:.0f} → {100 * run.success[1]:.0f}" for run in runs if run.success)
        lines.append(f"| {way} | {rates} | {rest} | {success} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("config", type=lambda text: str(Path(text).absolute()))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--hosts", type=int, default=3, help="how many, the first included")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--links", type=lambda text: text.split(","), default=["0"])
    parser.add_argument("--iterations", type=int, help="of short runs; default: the config's, with evaluations")
    parser.add_argument("--keep", type=Path, help="copy each run's metrics into this folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    try:
        for way in args.links:
            shape_of(way)
    except ValueError as error:
        parser.error(f"--links: {error}; write 10 for 10 ms, or 100mbit")
    if args.hosts < 2:
        parser.error("--hosts: use at least 2")
    if reason := obstacle():
        parser.error(f"no hosts can be made here: {reason}")
    found, about = [], dict[str, Any](machine=machine_record(), git_commit=git_commit())
    about |= {"config": str(Path(args.config).relative_to(ROOT)), "overrides": args.overrides, "hosts": args.hosts}
    with Network() as network:
        fleet = Fleet(network, args.hosts - 1)
        for seed in args.seeds:
            for way in [ONE, *args.links]:
                found.append(measure(fleet, way, seed, args))
                print(f"{way}, seed {seed}: {found[-1].chunks_per_s:.1f} chunks/s", flush=True)
                if args.json:
                    write_json(args.json, about | {"runs": [asdict(one) for one in found]})
    print(table(found))
    return int(any(one.missing for one in found))


if __name__ == "__main__":
    sys.exit(main())
