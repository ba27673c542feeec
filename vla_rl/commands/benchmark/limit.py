"""`vla-rl benchmark limit`: how near a run is to what no implementation of it avoids on this machine.

A short run of the configuration says what each part costs for a trained chunk: processor time, or a GPU's busy time.
Compared with it is what the part takes bare, measured here: on the GPU, or on all cores at once, as in a run. Bare are
the physics engine's own steps, filling the pixels of an observation, and the policy's products of matrices with their
shapes. Where a simulator does not know, its part counts in full. Whoever wants to be faster still needs other physics,
another policy or fewer episodes.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from statistics import fmean
from typing import Any

from rich.table import Table

from vla_rl.commands.benchmark.products import products_of
from vla_rl.commands.metadata import git_commit, machine_record, package_versions
from vla_rl.commands.short_run import short_run
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec, EpisodeSpec
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import read_metrics
from vla_rl.placement.checks import load_checked_config

_WARM_UP = 2  # iterations, of which some begin with empty queues
_SIMULATOR = ("simulate", "render", "reset")
_TOGETHER_S = 300.0  # until processes that measure at once have loaded what they need

_together: Barrier  # of such processes


@dataclass(frozen=True, slots=True)
class Part:
    """Milliseconds for a trained chunk."""

    name: str
    spent: float
    bare: float | None  # None: as much as is spent, as far as is known

    @property
    def needed(self) -> float:
        return self.spent if self.bare is None else min(self.bare, self.spent)


def limit_command(args: Any) -> int:
    """Measure, and print the table."""
    from envs import env_spec

    config, console = load_checked_config(args.config, args.overrides), make_console()
    machine = Machine.detect()
    at_once = 1 if machine.gpus else min(machine.cpus, config.placement.env_workers + 2)  # inference and learner
    bare = bare_costs(config, env_spec(config.env), at_once)
    with short_run(config, _WARM_UP + args.iterations) as run:
        metrics = [m for m in read_metrics(run) if m["iteration"] > _WARM_UP]
    parts = spent_parts(metrics, bare, on_gpu=bool(machine.gpus))
    chunks_per_s = sum(m["rollout/chunks"] for m in metrics) / sum(m["time/iteration_s"] for m in metrics)
    console.print(_table(parts))
    console.print(_verdict(parts, chunks_per_s, machine), highlight=False)
    if args.json:
        about = {"machine": machine_record(), "packages": package_versions(), "git_commit": git_commit()}
        write_json(args.json, about | {"parts": [asdict(part) for part in parts], "chunks_per_s": chunks_per_s})
    return 0


def spent_parts(metrics: Sequence[dict[str, float]], bare: dict[str, float], *, on_gpu: bool) -> list[Part]:
    """The parts of iterations; ``bare``: seconds for a chunk by part (``bare_costs``), or for a control step of it.

    Rollouts are ahead of the learner, so what they cost is divided by the chunks that they played meanwhile. Raises
    UserError if they played none.
    """

    def total(key: str) -> float:
        return sum(m.get(key, 0.0) for m in metrics)

    def over_time(key: str) -> float:
        return sum(m[key] * m["time/iteration_s"] for m in metrics)

    def busy(part: str) -> float:
        return over_time(f"busy/{part}")

    trained, played = total("rollout/chunks"), over_time("throughput/chunks_per_s")
    if not played:
        raise UserError("no episode was played in the measured iterations; measure more of them with --iterations")
    steps = over_time("throughput/env_steps_per_s") / played
    worked = {name: busy(name) for name in _SIMULATOR}
    cores = total("cpu/env_workers_s") / sum(worked.values())  # what waits for a core is not at work
    spent = {name: seconds * cores for name, seconds in worked.items()}
    for part in ("inference", "learner"):
        spent[part] = busy(part) if on_gpu else total(f"cpu/{part}_s")
    on_cores = sum(total(f"cpu/{part}_s") for part in ("env_workers", "inference", "learner"))
    needed = {name: seconds * (steps if name == "simulate" else 1.0) * 1e3 for name, seconds in bare.items()}
    chunks = dict.fromkeys((*_SIMULATOR, "inference"), played) | {"learner": trained}
    parts = [Part(name, 1e3 * seconds / chunks[name], needed.get(name)) for name, seconds in spent.items()]
    rest = max(0.0, total("time/iteration_cpu_s") - on_cores)
    return [*parts, Part("driver, store, Ray", 1e3 * rest / trained, 0.0)]


def bare_costs(config: RunConfig, spec: EnvSpec, processes: int = 1) -> dict[str, float]:
    """Seconds by part: "simulate" of a control step, "render", "inference" and "learner" of a chunk; without what is
    not known.

    The mean of so many processes that measure at once: a core is slower while the others work, as they do in a run.
    """
    spawning = multiprocessing.get_context("spawn")
    barrier = spawning.Barrier(processes)
    with ProcessPoolExecutor(processes, spawning, initializer=_meet_at, initargs=(barrier,)) as pool:
        found = list(pool.map(_bare_costs, [config] * processes, [spec] * processes))
    return {name: fmean(costs[name] for costs in found) for name in found[0]}


def _meet_at(barrier: Barrier) -> None:
    global _together
    _together = barrier


def _bare_costs(config: RunConfig, spec: EnvSpec) -> dict[str, float]:
    from envs import make_env
    from envs.base import empty_observation

    env = make_env(config.env, 1)
    try:
        env.reset([0], [EpisodeSpec(id=0, task=0, seed=config.seed, init_state=None)])
        env.observe([0], empty_observation(spec, 1))
        _together.wait(_TOGETHER_S)
        of_env = env.bare_seconds(0)
        _together.wait(_TOGETHER_S)
        return of_env | products_of(config, spec)
    except Exception:
        _together.abort()
        raise
    finally:
        env.close()


def _table(parts: Sequence[Part]) -> Table:
    table = Table(title="milliseconds for each trained chunk")
    for name in ("part", "this run", "bare", "this run / bare"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part in parts:
        bare = "not known" if part.bare is None else f"{part.bare:.1f}"
        table.add_row(part.name, f"{part.spent:.1f}", bare, f"{part.spent / part.bare:.2f}" if part.bare else "")
    spent, needed = sum(part.spent for part in parts), sum(part.needed for part in parts)
    table.add_row("sum", f"{spent:.1f}", f"{needed:.1f}", f"{spent / needed:.2f}")
    return table


def _verdict(parts: Sequence[Part], chunks_per_s: float, machine: Machine) -> str:
    share = sum(part.needed for part in parts) / sum(part.spent for part in parts)
    found = f"{chunks_per_s:.2f} trained chunks/s"
    if machine.gpus:
        return f"{found}; {share:.0%} of what this run spends is needed by any"
    possible = 1e3 * machine.cpus / sum(part.needed for part in parts)
    return f"{found}; {machine.cpus} cores that did nothing avoidable would train {possible:.2f}, so this is " + (
        f"{chunks_per_s / possible:.0%} of the limit"
    )
