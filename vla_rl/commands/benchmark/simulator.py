"""`vla-rl benchmark simulator`: the speed of LIBERO on one core, compared with hf-libero and LeRobot.

Each contestant is a separate process (``envs.libero.benchmark_worker``), and all are pinned to the same core. Each
plays once per round, so that disturbances on the machine affect all of them. Medians over all rounds are compared.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from envs.libero.benchmark_worker import Setup, contestants_here
from envs.libero.protocol.tasks import STEP_LIMITS
from vla_rl.commands.metadata import git_commit, machine_record, package_versions
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.observability.console import ProgressDisplay, make_console

GPU_RENDER_S = 2e-3  # assumed time per image on a GPU, for the arithmetic row of the table
_CHUNKS = 3  # per round
_MAY_DIFFER = {"lerobot, soft resets"}  # from the others in their states: LeRobot says so itself


@dataclass(slots=True)
class Figures:
    """One contestant's measurements, in seconds."""

    chunk: list[float] = field(default_factory=list)  # one rendered chunk
    blind_chunk: list[float] = field(default_factory=list)  # without rendering
    bare: list[float] = field(default_factory=list)  # the substeps of one control step, nothing around them
    reset: list[float] = field(default_factory=list)  # to another initial state of the same task
    switch: list[float] = field(default_factory=list)  # to another task
    memory: dict[str, float] = field(default_factory=dict)  # bytes of the "process", and of each further "env"

    def medians(self) -> dict[str, float | None]:
        return {name: median(v) if v else None for name, v in asdict(self).items() if isinstance(v, list)}


class _Contestant:
    """The parent's end of one contestant's process."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name, self.figures = name, Figures()
        # A file, because a pipe that is not read could block the process. Closed with the process.
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "envs.libero.benchmark_worker", name, json.dumps(asdict(setup))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "0"},
            text=True,
        )
        self.assets: str = self._answer()

    def ask(self, method: str, **values: Any) -> Any:
        """The result of a method of ``envs.libero.benchmark_worker.Contestant``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, values]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            raise UserError(f"{self.name} failed:\n{self._stderr.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()


def run_contestants(setup: Setup, names: Sequence[str], rounds: int, console: Console) -> dict[str, Any]:
    """Let all contestants play every round; returns the measurements, JSON-able.

    Raises UserError if one cannot be started, or if they do not reach the same state.
    """
    contestants: list[_Contestant] = []
    different: set[str] = set()
    try:
        for name in names:
            contestants.append(_Contestant(name, setup))
        with ProgressDisplay(console, f"{setup.cameras} camera(s)", rounds + 1) as progress:
            for number in range(rounds + 1):
                different |= _in_other_states({c.name: _play_round(c, number, first=number == 0) for c in contestants})
                progress.update(number + 1, "")
    finally:
        for contestant in contestants:
            contestant.close()
    return {
        "setup": asdict(setup),
        "assets": contestants[0].assets,
        "rounds": rounds,
        "other_states": sorted(different),
        "seconds": {c.name: asdict(c.figures) | {"median": c.figures.medians()} for c in contestants},
    }


def _play_round(contestant: _Contestant, number: int, *, first: bool) -> list[float]:
    """One contestant's part of a round; returns the simulator's state after its rendered chunks."""
    figures = Figures() if first else contestant.figures  # the first round compiles and fills caches
    for other in (True, False):
        figures.switch += contestant.ask("time_reset", other=other, init_state=number)
    figures.reset += contestant.ask("time_reset", other=False, init_state=number + 1)
    figures.chunk += contestant.ask("time_chunks", count=_CHUNKS, seed=number, blind=False)
    state: list[float] = contestant.ask("state")
    if first:  # before a peer builds a second environment for its blind steps
        contestant.figures.memory = contestant.ask("memory")
    figures.blind_chunk += contestant.ask("time_chunks", count=_CHUNKS, seed=number, blind=True)
    figures.bare += contestant.ask("time_bare_substeps")
    return state


def _in_other_states(states: dict[str, list[float]]) -> set[str]:
    """Who is in another state than the first. Raises UserError for those that must not be."""
    (first, expected), *others = states.items()
    different = {name for name, state in others if state != expected}
    if wrong := different - _MAY_DIFFER:
        raise UserError(f"{min(wrong)} and {first} played the same actions and arrived at different states")
    return different


def simulator_command(args: Any) -> int:
    """Measure with one camera and with two, print the tables."""
    if args.suite not in STEP_LIMITS:
        raise UserError(f"--suite {args.suite}: LIBERO has {', '.join(STEP_LIMITS)}")
    console = make_console()
    names = contestants_here()
    results = []
    for cameras in (1, 2):
        setup = Setup(args.suite, 0, 1, cameras, args.image_size, args.chunk_size)
        result = run_contestants(setup, names, args.rounds, console)
        console.print(_table(result))
        results.append(result)
    if "lerobot" not in names:
        console.print("lerobot is not installed here, so it is missing: see scripts/benchmark_simulator.sh")
    if args.json:
        about = {"machine": machine_record(), "packages": package_versions(), "git_commit": git_commit()}
        write_json(args.json, about | {"results": results})
    return 0


def _table(result: dict[str, Any]) -> Table:
    setup = result["setup"]
    table = Table(
        title=f"{setup['suite']}, one core, {setup['cameras']} camera(s) of {setup['image_size']} pixels, chunks of "
        f"{setup['chunk_size']} steps, assets: {result['assets']}; of medians, in brackets: vla_rl's over it",
    )
    table.add_column("in a second")
    medians = {name: figures["median"] for name, figures in result["seconds"].items()}
    for name in medians:
        table.add_column(name, justify="right")
    chunk = setup["chunk_size"]
    for label, key, count in (
        ("rendered chunks", "chunk", 1),
        ("control steps without rendering", "blind_chunk", chunk),
        ("control steps of bare physics", "bare", 1),
        ("resets, same task, settled", "reset", 1),
        ("resets, other task, settled", "switch", 1),
    ):
        table.add_row(label, *_cells([m[key] and count / m[key] for m in medians.values()]))
    frames = {name: 1 if name == "vla_rl" else chunk for name in medians}
    arithmetic = [
        m["blind_chunk"] and 1 / (m["blind_chunk"] + frames[name] * setup["cameras"] * GPU_RENDER_S)
        for name, m in medians.items()
    ]
    table.add_row(f"arithmetic: chunks, {GPU_RENDER_S * 1e3:.0f} ms a frame (GPU)", *_cells(arithmetic))
    for label, key in (("memory of the process", "process"), ("memory of a further environment", "env")):
        memory = [figures["memory"][key] / 2**20 for figures in result["seconds"].values()]
        table.add_row(label, *(f"{m:.0f} MiB" if m >= 1 else "below 1 MiB" for m in memory))
    table.add_row("the same states as vla_rl", *("no" if n in result["other_states"] else "yes" for n in medians))
    return table


def _cells(rates: Sequence[float | None]) -> list[str]:
    ours = rates[0]
    cells = []
    for rate in rates:
        ratio = f" ({ours / rate:.1f}x)" if rate and ours and rate is not ours else ""
        cells.append(f"{rate:.2f}{ratio}" if rate else "-")
    return cells
