"""Batches a second across device counts and modes: `vla-rl benchmark scaling CONFIG --devices 1,2,4,8`.

A config describes the workload of one device: super-batch and simulators grow with the number of devices. Every point
is measured on *virtual* devices: the real runtime, with computing replaced by holding a device. Beside it stand
the bound, the discrete-event simulation of the same plan, and the synchronous reference.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from vla_rl.config import RunConfig, WorkloadConfig
from vla_rl.config_loading import load_config
from vla_rl.cost_model import Job
from vla_rl.errors import UserError
from vla_rl.machine import Machine
from vla_rl.placement import Mode, Plan, PlanError, Resources
from vla_rl.planner import search
from vla_rl.profile import Profile, load_profile, save_profile
from vla_rl.run_folder import machine

COOLDOWN = 2  # last iterations, for which everything has been played before
REFERENCE = "synchronous reference"


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement, in the time of the profile (seconds are divided by the time scale)."""

    devices: int
    mode: str  # or REFERENCE
    layout: str
    backend: str  # "virtual" or "simulated"
    batches_per_s: float
    env_steps_per_s: float
    chunks_per_s: float
    efficiency: float  # of the bound
    simulated: float  # batches a second that the discrete-event simulation predicts
    limit: str  # the resource that bounds it
    control_plane: float  # share of this machine's cores that the runtime itself took


def scaling_command(args: Any) -> int:
    """Measure all points, print and draw them."""
    config = load_config(args.config, args.overrides, Machine.detect())
    if config.placement.virtual is None:
        raise UserError(f"{args.config}: placement.virtual names no profile; see configs/scaling for configs that do")
    profile = load_profile(Path(config.placement.virtual))
    modes: Sequence[str] = (*get_args(Mode), REFERENCE) if args.mode == "all" else args.mode.split(",")
    console, points = Console(), []
    for devices in args.devices:
        for mode in modes:
            try:
                points.append(measure(config, profile, devices, mode, args.iterations))
            except PlanError as error:
                console.print(f"{devices} device(s), {mode}: {error}")
                continue
            console.print(_line(points[-1]))
    console.print(make_table(points, f"{profile.name}, virtual devices"))
    if args.json:
        record = {"machine": machine(), "config": config.model_dump(mode="json"), "points": [asdict(p) for p in points]}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(Point.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(p) for p in points)
    if args.output:
        from vla_rl.report import draw_scaling

        draw_scaling(points, args.output, f"{profile.name}: virtual devices")
    return 0


def measure(config: RunConfig, profile: Profile, devices: int, mode: str, iterations: int) -> Point:
    """Run one point on virtual devices. Raises PlanError where the mode cannot be."""
    scaled = for_devices(config, profile, devices)
    if mode == REFERENCE:
        scaled, profile = as_reference(scaled, profile)
        layout_mode: Mode | None = "collocated"
    else:
        layout_mode = None if mode == "auto" else mode  # type: ignore[assignment]
    resources = Resources.of(Machine.detect(), scaled)
    job = Job.of(scaled, *_lengths(scaled))
    best = search(scaled, resources, profile, job, layout_mode)[0]
    seconds, steps, chunks, load = run_virtual(scaled, profile, best.plan, iterations)
    least = best.bound.in_turns if mode == REFERENCE else best.bound.seconds
    return Point(
        devices=devices,
        mode=mode,
        layout=best.layout.describe(),
        backend="virtual",
        batches_per_s=1 / seconds,
        env_steps_per_s=steps / seconds,
        chunks_per_s=chunks / seconds,
        efficiency=least / seconds,
        simulated=1 / (best.simulated or seconds),
        limit=best.bound.limit,
        control_plane=load,
    )


def for_devices(config: RunConfig, profile: Profile, devices: int) -> RunConfig:
    """The workload of one device, for several; the simulator's costs as the profile says."""
    env, placement, scale = config.env, config.placement, config.placement.time_scale
    if not isinstance(env, WorkloadConfig):
        raise UserError("placement.virtual needs env=workload")
    simulate, render, chunk = profile.simulate, profile.render, config.policy.chunk_size
    costs = {
        "step_ms": simulate.each / chunk,
        "step_call_ms": simulate.fixed,
        "render_ms": render.each,
        "render_call_ms": render.fixed,
        "reset_ms": profile.reset,
    }
    changed = {name: seconds * 1e3 * scale for name, seconds in costs.items()}
    on_devices = profile.simulator_on == "devices"
    return config.model_copy(
        update={
            "env": env.model_copy(update=changed | {"on_devices": on_devices}),
            "train": config.train.model_copy(update={"batch_episodes": config.train.batch_episodes * devices}),
            "placement": placement.model_copy(
                update={"devices": devices, "env_workers": placement.env_workers * devices}
            ),
        }
    )


def as_reference(config: RunConfig, profile: Profile) -> tuple[RunConfig, Profile]:
    """Phase by phase, as RL4VLA and SimpleVLA-RL do it: all slots wait for each other at every step, finished episodes
    run on to the horizon, and training begins when all are done. Generous in one point: what lies behind an episode's
    end is not trained on, so the learner's cost is that of the executed chunks."""
    env, placement = config.env, config.placement
    assert isinstance(env, WorkloadConfig)
    train = profile.train.model_copy(update={"each": profile.train.each * (1 - env.length_spread / 2)})
    workers = 1 if env.on_devices else placement.env_workers // (placement.devices or 1)
    slots = workers * placement.slots_per_worker  # of one server: they all wait for each other
    lockstep = placement.model_copy(update={"max_wait_ms": 600_000.0, "max_batch": slots})
    return (
        config.model_copy(
            update={
                "mode": "sync",
                "env": env.model_copy(update={"length_spread": 0.0}),
                "placement": lockstep,
            }
        ),
        profile.model_copy(update={"train": train}),
    )


def run_virtual(config: RunConfig, profile: Profile, plan: Plan, iterations: int) -> tuple[float, float, float, float]:
    """Seconds, control steps and chunks of one super-batch, in the profile's time, and the share of this machine's
    cores that was in use."""
    from vla_rl.runner import train

    layout = plan.layout
    warmup = config.train.max_age + 3  # until what was played before the first update has been trained
    with tempfile.TemporaryDirectory() as folder:
        save_profile(profile, Path(folder) / "profile.yaml")
        placement = config.placement.model_copy(
            update={
                "virtual": str(Path(folder) / "profile.yaml"),
                "mode": layout.mode,
                "inference_devices": len(layout.inference) if layout.mode != "collocated" else None,
                "simulator_devices": len(layout.simulators) or None if layout.mode != "collocated" else None,
                "offload": "always" if plan.offload else "never",
            }
        )
        rounds = config.train.model_copy(
            update={
                "iterations": warmup + iterations + COOLDOWN,
                "eval_episodes": 0,
                "checkpoint_every": 10**6,
            }
        )
        log = config.log.model_copy(update={"dir": folder, "name": "run", "tensorboard": False, "video": False})
        train(config.model_copy(update={"placement": placement, "train": rounds, "log": log}))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines][warmup : warmup + iterations]

    def mean(name: str) -> float:
        return sum(m[name] for m in measured) / len(measured)

    return (
        mean("time/iteration_s") / config.placement.time_scale,
        mean("rollout/env_steps"),
        mean("rollout/chunks"),
        mean("machine/cpu"),
    )


def _lengths(config: RunConfig) -> tuple[int, float]:
    env = config.env
    assert isinstance(env, WorkloadConfig)
    return env.max_episode_steps, env.length_spread


def _line(p: Point) -> str:
    return (
        f"{p.devices} device(s), {p.mode} ({p.layout}): {p.batches_per_s:.4g} batches/s, {p.efficiency:.0%} of the "
        f"bound, simulated {p.simulated:.4g}, {p.control_plane:.0%} of this machine's cores in use"
    )


def make_table(points: Sequence[Point], title: str) -> Table:
    """Per device count and mode; the gain is over the reference on as many devices."""
    table = Table(title=title)
    for name in ("devices", "mode", "layout", "batches/s", "steps/s", "of bound", "simulated", "gain"):
        table.add_column(name, justify="left" if name in ("mode", "layout") else "right")
    reference = {p.devices: p.batches_per_s for p in points if p.mode == REFERENCE}
    for p in points:
        gain = f"{p.batches_per_s / reference[p.devices]:.2f}x" if p.devices in reference else "-"
        rates = [f"{x:.4g}" for x in (p.batches_per_s, p.env_steps_per_s)]
        simulated = f"{p.simulated / p.batches_per_s - 1:+.0%}"
        table.add_row(str(p.devices), p.mode, p.layout, *rates, f"{p.efficiency:.0%}", simulated, gain)
    return table
