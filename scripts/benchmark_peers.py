"""`vla-rl train` beside what else one would take, for scripts/benchmark_peers.sh: control steps that are learned from.

Each block runs every contestant once, one at a time, and every other block in the opposite order: whatever disturbs the
machine meets all. A ratio is this project's rate over a peer's in the same block.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from vla_rl.commands.benchmark.regress import Comparison
from vla_rl.commands.metadata import git_commit, machine_record, package_versions
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.machine import CODE
from vla_rl.observability.console import make_console

PEERS = ("torchrl", "rllib", "sb3", "gymnasium")
LIMIT_S = 3600  # of one measurement, start and warm-up included
# One thread in each environment's process; learners set their own. No library asks anybody about itself.
VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "0", "TOKENIZERS_PARALLELISM": "false"}
QUIET = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "disabled"}


@dataclass(frozen=True)
class Contestant:
    """A library in a simulator; see ``scripts/peers/setting.py``."""

    peer: str  # "vla_rl", or the name of its environment and of scripts/peers/with_NAME.py
    simulator: str

    @property
    def name(self) -> str:
        return f"{self.peer}/{self.simulator}"

    @property
    def ours(self) -> "Contestant":
        return Contestant("vla_rl", "tabletop" if self.simulator == "tabletop" else "ours")


CONTESTANTS = [
    Contestant("vla_rl", "ours"),
    *(Contestant(peer, simulator) for peer in PEERS for simulator in ("theirs", "ours")),
    Contestant("vla_rl", "tabletop"),
    *(Contestant(peer, "tabletop") for peer in (*PEERS, "sample_factory")),
]


def chosen(only: Sequence[str]) -> list[Contestant]:
    """Those named by peer, by simulator, or by both, and this project's run beside them; all without a name."""
    named = [c for c in CONTESTANTS if not only or {c.peer, c.simulator, c.name} & set(only)]
    if unknown := [name for name in only if not any(name in (c.peer, c.simulator, c.name) for c in CONTESTANTS)]:
        raise UserError(f"--only {unknown[0]}: there are {', '.join(c.name for c in CONTESTANTS)}")
    return [c for c in CONTESTANTS if c in named or c in {one.ours for one in named}]


def measure(contestant: Contestant, folder: Path, seconds: float) -> dict[str, Any]:
    """The line that a contestant prints. Raises UserError with the end of its output if there is none."""
    own = contestant.peer == "vla_rl"
    module = "ours" if own else f"with_{contestant.peer}"
    python = sys.executable if own else folder / contestant.peer / "bin" / "python"
    options = ["--simulator", contestant.simulator, "--seconds", str(seconds)]
    done = subprocess.run(
        ["timeout", "--foreground", str(LIMIT_S), str(python), "-m", f"peers.{module}", *options],
        env=os.environ | VARIABLES | QUIET | {"PYTHONPATH": f"{CODE}:{CODE}/scripts"},
        cwd=CODE,
        capture_output=True,
        text=True,
        check=False,
    )
    if lines := [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    raise UserError(f"{contestant.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def compare(results: Mapping[Contestant, Sequence[Mapping[str, Any]]]) -> list[tuple[Contestant, Comparison]]:
    """Rates of each contestant (as old) and of this project (as new), by block, as far as a contestant came."""
    rates = {contestant: [line["steps_per_s"] for line in lines] for contestant, lines in results.items()}
    both = ((c, Comparison(c.name, old, rates[c.ours][: len(old)])) for c, old in rates.items() if old)
    return [(c, one) for c, one in both if len(one.new) == len(one.old)]


def table(compared: Sequence[tuple[Contestant, Comparison]]) -> Table:
    found = Table(title="control steps that are learned from, a second; medians over blocks")
    for name in ("library", "simulator", "steps/s", "vla_rl is faster by", "95 % interval", "blocks"):
        found.add_column(name, justify="left" if name in ("library", "simulator") else "right")
    for contestant, one in compared:
        row = [contestant.peer, contestant.simulator, f"{median(one.old):.1f}"]
        if contestant.peer != "vla_rl":
            low, high = one.interval()
            row += [
                f"{median(one.ratios):.2f}x",
                f"{low:.2f} to {high:.2f}" if len(one.old) > 1 else "",
                str(len(one.old)),
            ]
        found.add_row(*row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="This project's training beside that of other libraries.")
    parser.add_argument("folder", type=Path, help="with an environment for each library")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each measurement, after its warm-up")
    parser.add_argument("--only", action="append", default=[], help="PEER, SIMULATOR or PEER/SIMULATOR; repeatable")
    parser.add_argument("--json", type=Path, help="written after each block")
    args = parser.parse_args()
    console, contestants = make_console(), chosen(args.only)
    results: dict[Contestant, list[dict[str, Any]]] = {contestant: [] for contestant in contestants}
    failed: set[Contestant] = set()
    for block in range(args.blocks):
        for contestant in contestants if block % 2 == 0 else reversed(contestants):
            if contestant in failed:
                continue
            try:
                results[contestant].append(measure(contestant, args.folder, args.seconds))
                rate = results[contestant][-1]["steps_per_s"]
                console.print(f"block {block + 1}: {contestant.name} {rate:.1f} steps/s", highlight=False)
            except UserError as error:
                failed.add(contestant)  # the others go on
                console.print(f"block {block + 1}: {error}", highlight=False, markup=False)
        if args.json:
            about = {"machine": machine_record(), "packages": package_versions(), "git_commit": git_commit()}
            write_json(args.json, about | {"lines": {c.name: lines for c, lines in results.items()}})
    console.print(table(compare(results)))
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
