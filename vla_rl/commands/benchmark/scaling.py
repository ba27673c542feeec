"""`vla-rl benchmark scaling CONFIG --devices 1,2,4,8`: batches/s across device counts and placement modes.

A config describes the workload of one device; super-batch and simulators grow with the number of devices. There are
three back ends, named with every result:

    real       a real run on this machine's devices (CPU cores if it has no GPU)
    virtual    the real runtime, with computing replaced by holding a device as long as a profile says
    simulated  discrete events by the same profile, for device counts far beyond this machine

With a profile, every point is shown with the bound and the simulation of the same plan, and with a synchronous
reference.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envs.workload.config import WorkloadConfig
from vla_rl.commands.benchmark.scaling_points import (
    MODES,
    REFERENCE,
    Backend,
    Point,
    draw_scaling,
    line_of,
    make_table,
    read_points,
    write_csv,
    write_points,
)
from vla_rl.commands.metadata import machine_record
from vla_rl.commands.short_run import short_run
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.machine import Machine
from vla_rl.observability.console import make_console
from vla_rl.observability.plots import read_metrics
from vla_rl.placement.checks import load_checked_config
from vla_rl.placement.plan import Mode, Plan, PlanError
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import Profile, load_profile, save_profile
from vla_rl.placement.resources import Resources
from vla_rl.placement.search import Candidate, search
from vla_rl.placement.workload import Workload

COOLDOWN = 2  # last iterations, whose episodes have all been played before
_OWN_LIMIT = 0.8  # share of this machine's cores beyond which the machine itself is the bottleneck
_LIGHT = 4  # virtual devices that one machine's runtime can serve; for more, time is stretched in proportion


@dataclass(frozen=True, slots=True)
class Case:
    """What one point runs."""

    config: RunConfig  # for its number of devices
    mode: str
    devices: int
    plan: Plan
    profile: Profile | None = None
    workload: Workload | None = None
    expected: Candidate | None = None

    @property
    def least_seconds(self) -> float | None:
        """Least seconds per super-batch, by the bound. The reference runs its phases one after the other."""
        if self.expected is None:
            return None
        return self.expected.bound.sequential_seconds if self.mode == REFERENCE else self.expected.bound.seconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """Means per iteration, in the profile's time."""

    seconds: float
    steps: float  # control steps played
    chunks: float
    machine: float | None = None  # share of this machine's cores in use


def scaling_command(args: Any) -> int:
    """Measure all points that ``--json`` does not hold yet, print and draw them."""
    config = load_checked_config(args.config, args.overrides)
    backend = choose_backend(config, args.backend)
    name = config.placement.virtual or config.placement.profile
    profile = None if name is None else load_profile(Path(name))
    modes = MODES if args.mode == "all" else args.mode.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise UserError(f"--mode {','.join(unknown)}: known are all, {', '.join(MODES)}")
    costs = profile and profile.model_dump(mode="json")
    about = {
        "machine": machine_record(),
        "backend": backend,
        "config": config.model_dump(mode="json"),
        "profile": costs,
    }
    console, points = make_console(), read_points(args.json, about)
    for devices in args.devices:
        for mode in modes:
            if any((p.devices, p.mode) == (devices, mode) for p in points):
                continue
            try:
                case = prepare(config, profile, devices, mode)
            except PlanError as error:
                console.print(f"{devices} device(s), {mode}: {error}")
                continue
            point = _known(case, points) or measure_point(case, backend, args.iterations)
            console.print(line_of(point))
            if point.time_scale is not None and (point.machine or 0.0) > _OWN_LIMIT:
                console.print("discarded: this machine was the limit; raise placement.time_scale")
                continue
            points.append(point)
            write_points(points, args.json, about)  # after every point: an interrupted benchmark continues
    points.sort(key=lambda p: (p.devices, MODES.index(p.mode)))
    title = f"{args.config.stem if profile is None else profile.name}, {backend} devices"
    console.print(make_table(points, title))
    write_points(points, args.json, about)
    if args.csv:
        write_csv(points, args.csv)
    if args.output:
        draw_scaling(points, args.output, title)
    return 0


def choose_backend(config: RunConfig, asked: Backend | None) -> Backend:
    """The back end that was asked for, else the config's own. Raises UserError if the two do not fit."""
    virtual = config.placement.virtual is not None
    backend: Backend = asked or ("virtual" if virtual else "real")
    if backend == "real" and virtual:
        raise UserError("--backend real: placement.virtual names a profile; set placement.virtual=null and a real env")
    if backend != "real" and not virtual:
        raise UserError(
            f"--backend {backend}: placement.virtual names no profile; see configs/scaling for such configs"
        )
    return backend


def prepare(config: RunConfig, profile: Profile | None, devices: int, mode: str) -> Case:
    """A point's config and its best layout. Raises PlanError if the mode is impossible there."""
    layout_mode: Mode | None = None if mode == "auto" else "collocated" if mode == REFERENCE else mode  # type: ignore[assignment]
    if not isinstance(config.env, WorkloadConfig) or profile is None:
        scaled = _multiplied(config, devices, layout_mode or "auto")
        if mode == REFERENCE:
            scaled = scaled.with_values({"mode": "sync"})
        return Case(scaled, mode, devices, make_plan(scaled, Resources.of(Machine.detect(), scaled)))
    scaled = for_devices(config, profile, devices)
    if mode == REFERENCE:
        scaled, profile = as_reference(scaled, profile)
    workload = Workload.of(scaled, *_lengths(scaled))
    best = search(scaled, Resources.of(Machine.detect(), scaled), profile, workload, layout_mode)[0]
    return Case(scaled, mode, devices, best.plan, profile, workload, best)


def _known(case: Case, points: Sequence[Point]) -> Point | None:
    """The point of mode auto, if the layout that it chose has been measured already: the run would be the same."""
    if case.mode != "auto":
        return None
    candidates = [p for p in points if p.devices == case.devices and p.mode != REFERENCE]
    same = next((p for p in candidates if p.layout == case.plan.layout.describe()), None)
    return same and replace(same, mode="auto")


def measure_point(case: Case, backend: Backend, iterations: int) -> Point:
    """Run one point."""
    expected = case.expected
    if backend == "simulated":
        assert expected is not None
        assert expected.simulated is not None
        assert case.workload is not None
        found = Measurement(expected.simulated, case.workload.steps, case.workload.chunks)
    elif backend == "virtual":
        assert case.profile is not None
        found = run_virtual(case.config, case.profile, case.plan, iterations)
    else:
        found = run_real(case.config, iterations)
    size = found.steps / case.workload.steps if case.workload else 1.0  # in units of a mean super-batch
    batches_per_s = size / found.seconds
    return Point(
        devices=case.devices,
        mode=case.mode,
        layout=case.plan.layout.describe(),
        backend=backend,
        batches_per_s=batches_per_s,
        env_steps_per_s=found.steps / found.seconds,
        chunks_per_s=found.chunks / found.seconds,
        efficiency=case.least_seconds and case.least_seconds * batches_per_s,
        simulated=1 / expected.simulated if expected and expected.simulated else None,
        limit=expected.bound.limit if expected else None,
        machine=found.machine,
        time_scale=case.config.placement.time_scale if backend == "virtual" else None,
    )


def _multiplied(config: RunConfig, devices: int, mode: str) -> RunConfig:
    """Multiply the workload of one device by the number of devices."""
    episodes, workers = config.train.batch_episodes * devices, config.placement.env_workers * devices
    placement = {"devices": devices, "env_workers": workers, "mode": mode}
    return config.with_values(
        {"train.batch_episodes": episodes} | {f"placement.{name}": value for name, value in placement.items()}
    )


def for_devices(config: RunConfig, profile: Profile, devices: int) -> RunConfig:
    """Multiply the workload of one device by the number of devices, with the simulator's costs of the profile."""
    env, scale = config.env, config.placement.time_scale * max(1.0, devices / _LIGHT)
    assert isinstance(env, WorkloadConfig)
    simulate, render, chunk = profile.simulate, profile.render, config.policy.chunk_size
    seconds = {
        "step_ms": simulate.each / chunk,
        "step_call_ms": simulate.fixed,
        "render_ms": render.each,
        "render_call_ms": render.fixed,
        "reset_ms": profile.reset,
    }
    values = {f"env.{name}": x * 1e3 * scale for name, x in seconds.items()}
    values |= {"env.on_devices": profile.simulator_on == "devices", "placement.time_scale": scale}
    return _multiplied(config, devices, config.placement.mode).with_values(values)


def as_reference(config: RunConfig, profile: Profile) -> tuple[RunConfig, Profile]:
    """The synchronous reference, phase by phase, as RL4VLA and SimpleVLA-RL work.

    All environments wait for each other at every step, finished episodes run on to the horizon, and training begins
    when all are done. The reference is generous in two points: steps after an episode's end are not trained on, and no
    final observation is inferred, which only some environments would request while the others are done.
    """
    env, placement = config.env, config.placement
    assert isinstance(env, WorkloadConfig)
    train = profile.train.model_copy(update={"each": profile.train.each * (1 - env.length_spread / 2)})
    devices = placement.devices or 1
    workers = 1 if env.on_devices else placement.env_workers // devices
    envs = workers * placement.envs_per_worker  # of one server; in lockstep, all of them wait for each other
    lockstep = {
        "mode": "sync",
        "env.length_spread": 0.0,
        "placement.max_wait_ms": 600_000.0,
        "placement.max_batch": min(envs, config.train.batch_episodes // devices),
    }
    if config.algo.bootstrap_rule != "never":
        lockstep["algo.bootstrap"] = "never"
    return config.with_values(lockstep), profile.model_copy(update={"train": train})


def run_virtual(config: RunConfig, profile: Profile, plan: Plan, iterations: int) -> Measurement:
    """Train on virtual devices; the result is in the profile's time."""
    layout = plan.layout
    with tempfile.TemporaryDirectory() as folder:
        save_profile(profile, Path(folder) / "profile.yaml")
        splits = layout.mode != "collocated"
        placement = {
            "virtual": str(Path(folder) / "profile.yaml"),
            "mode": layout.mode,
            "inference_devices": len(layout.inference) if splits else None,
            "simulator_devices": len(layout.simulators) or None if splits else None,
            "offload": "always" if plan.offload else "never",
            "max_wait_ms": config.placement.max_wait_ms * config.placement.time_scale,
        }
        found = run_real(config.with_values({f"placement.{k}": v for k, v in placement.items()}), iterations)
    return replace(found, seconds=found.seconds / config.placement.time_scale)


def run_real(config: RunConfig, iterations: int) -> Measurement:
    """Train, and measure the iterations after the first ones and before the last ones."""
    sync = config.mode == "sync"
    warmup = 1 if sync else config.max_staleness + 3  # until the episodes played before the first update are trained
    with short_run(config, warmup + iterations + (0 if sync else COOLDOWN)) as run:
        measured = [m for m in read_metrics(run) if m["iteration"] > 0][warmup : warmup + iterations]
    seconds = [m["time/iteration_s"] for m in measured]

    def played(name: str) -> float:
        """Per iteration. Counts what is played: few super-batches do not have the mean size."""
        return sum(m[f"throughput/{name}_per_s"] * s for m, s in zip(measured, seconds, strict=True)) / iterations

    cpu = sum(m["machine/cpu"] for m in measured) / iterations
    return Measurement(sum(seconds) / iterations, played("env_steps"), played("chunks"), cpu)


def _lengths(config: RunConfig) -> tuple[int, float]:
    env = config.env
    assert isinstance(env, WorkloadConfig)
    return env.max_episode_steps, env.length_spread
