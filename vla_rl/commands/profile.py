"""`vla-rl profile`: measures what each activity of a run costs here, one after the other, and writes a profile.

Simulator, inference, learner and hand-over are the real ones, each alone in this process with the threads that the plan
gives it. Costs over sizes are fitted by a straight line, ``fixed + each * n``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from algos import make_algorithm
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine, free_port
from vla_rl.core.records import EnvSpec, Episode, Observation, SuperBatch, Trajectory
from vla_rl.observability.console import ProgressDisplay, make_console
from vla_rl.observability.meter import LineSums
from vla_rl.placement.checks import machine_checks
from vla_rl.placement.measured_profile import fit as fit_sums
from vla_rl.placement.plan import Resources, choose_layout, make_plan, simulator_on_devices
from vla_rl.placement.profile import Curve, Profile, memory_of, save_profile

_REPEATS = 5
_EPISODE_CHUNKS = 4  # of the made-up episodes that the learner is timed with


def profile_command(args: Any) -> int:
    """Measure, show and save."""
    config = load_config(args.config, args.overrides, machine_checks(Machine.detect()))
    profile = measure(config)
    console = make_console()
    table = Table(title=profile.name)
    for name in ("activity", "fixed", "each"):
        table.add_column(name, justify="left" if name == "activity" else "right")
    for name in ("simulate", "render", "infer", "train"):
        curve: Curve = getattr(profile, name)
        table.add_row(name, f"{1e3 * curve.fixed:.2f} ms", f"{1e3 * curve.each:.2f} ms")
    for name in ("reset", "step", "transfer", "onload", "offload"):
        table.add_row(name, f"{1e3 * getattr(profile, name):.2f} ms", "")
    console.print(table)
    save_profile(profile, args.output)
    console.print(f"{args.output}: use it with placement.profile={args.output}, or in vla-rl plan")
    return 0


def measure(config: RunConfig) -> Profile:
    """All costs, on this machine. Raises UserError where simulator or policy cannot be made."""
    import torch

    from envs import env_spec
    from vla_rl.policies import check_policy

    spec = env_spec(config.env)
    check_policy(config.policy, spec)
    resources = Resources.of(Machine.detect(), config)
    plan = make_plan(config, resources, choose_layout(config, resources))
    with ProgressDisplay(make_console(), "measuring", 4) as progress:
        simulator = measure_simulator(config, plan.slots)
        progress.update(1)
        torch.set_num_threads(plan.servers[0].threads)
        infer, actor = measure_inference(config, spec, plan.max_batch, plan.servers[0].torch_device)
        actor.offload()  # the learner may need the room
        progress.update(2)
        torch.set_num_threads(plan.learners[0].threads)
        train, step, learner = measure_learner(config, spec, plan.learners[0].torch_device)
        progress.update(3)
        changes = measure_changes(learner, actor)
        progress.update(4)
    return Profile(
        name=f"{spec.name} and {config.policy.checkpoint or config.policy.size}, measured",
        simulator_on="devices" if simulator_on_devices(config, resources.kind) else "cores",
        **simulator,
        infer=infer,
        train=train,
        step=step,
        **changes,
        memory=memory_of(config, actor.policy),
        sources={"all": "vla-rl profile, each activity alone", "memory": "sizes of parameters, gradients and moments"},
    )


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """The straight line nearest to the measurements, by the rules of a run's own profile."""
    line = LineSums()
    for n, t in zip(sizes, seconds, strict=True):
        line.add(n, t)
    return fit_sums(line)


def sizes_up_to(largest: int) -> list[int]:
    """Powers of two, and the largest."""
    return sorted({min(2**i, largest) for i in range(largest.bit_length() + 1)})


def timed(action: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Median seconds, after one turn that does not count."""
    action()
    return median(_seconds(action) for _ in range(repeats))


def measure_simulator(config: RunConfig, slots: int) -> dict[str, Any]:
    """Costs of one chunk, one observation and one reset, with random actions."""
    from envs import make_env
    from envs.base import empty_observation

    env = make_env(config.env, slots)
    rng, out = np.random.default_rng(0), empty_observation(env.spec, slots)
    everything, resets, count = list(range(slots)), [], 0

    def start(some: list[int]) -> None:
        nonlocal count
        episodes = [Episode(count + i, (count + i) % len(env.spec.instructions), count + i) for i in range(len(some))]
        count += len(some)
        began = time.perf_counter()
        env.reset(some, episodes)
        resets.append((time.perf_counter() - began) / len(some))

    start(everything)
    steps: dict[int, list[float]] = {n: [] for n in sizes_up_to(slots)}
    renders: dict[int, list[float]] = {n: [] for n in steps}
    for n in [n for _ in range(_REPEATS) for n in steps]:
        some = everything[:n]
        actions = rng.uniform(-0.3, 0.3, (n, config.policy.chunk_size, env.spec.action_dim)).astype(np.float32)
        began = time.perf_counter()
        result = env.step(some, actions)
        executed = result.num_steps.sum() / (n * config.policy.chunk_size)
        steps[n].append((time.perf_counter() - began) / executed)
        began = time.perf_counter()
        env.observe(some, out)
        renders[n].append(time.perf_counter() - began)
        ended = [slot for slot, over in zip(some, result.terminated | result.truncated, strict=True) if over]
        if ended:
            start(ended)
    env.close()
    return {
        "simulate": fit(list(steps), [median(x) for x in steps.values()]),
        "render": fit(list(renders), [median(x) for x in renders.values()]),
        "reset": median(resets),
    }


def measure_inference(config: RunConfig, spec: EnvSpec, max_batch: int, device: str) -> tuple[Curve, Any]:
    """(cost of a batch, the actor)."""
    from vla_rl.inference.policy_runner import PolicyActor
    from vla_rl.learner.learner import DTYPES
    from vla_rl.policies import build_policy

    policy = build_policy(config.policy, spec, config.seed)
    policy.to(DTYPES[config.learner.precision])
    actor = PolicyActor(policy, config.policy.temperature, None, device)
    sizes = sizes_up_to(max_batch)

    def act(n: int) -> Callable[[], object]:
        size = spec.image_size
        observation = Observation(
            images=np.zeros((n, len(spec.views), size, size, 3), np.uint8),
            proprio=np.zeros((n, spec.proprio_dim), np.float32),
            task=np.zeros(n, np.int32),
        )
        draws = np.full((n, config.policy.chunk_size, spec.action_dim), 0.5, np.float32)
        return lambda: actor.act(observation, draws, np.zeros(n, bool))

    return fit(sizes, [timed(act(n)) for n in sizes]), actor


def measure_learner(config: RunConfig, spec: EnvSpec, device: str) -> tuple[Curve, float, Any]:
    """(cost of a micro-batch, of an optimizer step, the learner): one and two micro-batches tell them apart."""
    from vla_rl.learner.learner import Learner, join_ranks
    from vla_rl.policies import build_policy

    join_ranks(0, 1, "127.0.0.1", free_port(), device)
    algo = config.algo.model_copy(update={"minibatches": 1, "epochs": 1, "proximal": "behaviour", "kl_coef": 0.0})
    sizes = [n for n in sizes_up_to(config.learner.micro_batch) if n >= 2][-3:]
    once: list[float] = []
    twice: list[float] = []
    learner: Any = None
    for n in sizes:
        settings = config.learner.model_copy(update={"micro_batch": n, "ranks": None})
        changed = config.model_copy(update={"algo": algo, "learner": settings})
        policy = build_policy(config.policy, spec, config.seed)
        learner = Learner(changed, policy, make_algorithm(algo), rank=0, world_size=1, device=device)
        for passes, results in ((1, once), (2, twice)):
            batch = made_up_batch(config, spec, passes * n)
            results.append(timed(lambda learner=learner, batch=batch: learner.update(batch, 0), 3))  # type: ignore[misc]
    train = [max(0.0, second - first) for first, second in zip(once, twice, strict=True)]
    step = median(max(0.0, 2 * first - second) for first, second in zip(once, twice, strict=True))
    return fit(sizes, train), step, learner


def made_up_batch(config: RunConfig, spec: EnvSpec, chunks: int) -> SuperBatch:
    """A super-batch of the right shapes, in groups of two episodes, with zeros to learn from."""
    from vla_rl.replay.super_batch import collate

    k, size = config.policy.chunk_size, spec.image_size
    lengths = [_EPISODE_CHUNKS] * (chunks // _EPISODE_CHUNKS)
    lengths = [*lengths, chunks - sum(lengths)] if chunks > sum(lengths) else lengths
    lengths = lengths if len(lengths) > 1 else [chunks // 2, chunks - chunks // 2]
    group = config.algo.groups.size

    def episode(i: int, n: int) -> Trajectory:
        return Trajectory(
            episode=Episode(i, 0, i, group=0 if group > 1 else i),
            images=np.zeros((n, len(spec.views), size, size, 3), np.uint8),
            proprio=np.zeros((n, spec.proprio_dim), np.float32),
            tokens=np.zeros((n, k, spec.action_dim), np.uint8),
            logprobs=np.full((n, k, spec.action_dim), -5.0, np.float32),
            values=np.zeros(n, np.float32),
            versions=np.zeros(n, np.int32),
            rewards=np.zeros((n, k), np.float32),
            num_steps=np.full(n, k, np.int32),
            final_value=0.0,
            terminated=True,
            truncated=False,
            success=i % 2 == 0,
        )

    return collate([episode(i, n) for i, n in enumerate(lengths)], version=0)


def measure_changes(learner: Any, actor: Any) -> dict[str, float]:
    """Seconds of a hand-over of weights through shared memory, and of a device's change from inference to the learner
    and back.

    In the order of a run that offloads: a device that cannot hold both has to be measured as well.
    """
    from vla_rl.core.ipc.shared_memory import shared_root
    from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weights

    with tempfile.TemporaryDirectory(dir=shared_root()) as folder:
        path = Path(folder) / "weights"
        actor.offload()
        create_weights(path, learner.parameters())
        publisher, reader, target = WeightPublisher(path), WeightReader(path), actor.policy.trained_parameters()
        rounds = []
        for version in range(1 + _REPEATS):  # the first, from where nothing has moved yet, does not count
            steps: list[Callable[[], object]] = [
                lambda: (actor.offload(), learner.onload()),
                lambda version=version: learner.publish(version, publisher),  # type: ignore[misc]
                lambda: (learner.offload(), actor.onload()),
                lambda: reader.refresh(target),
            ]
            rounds.append([_seconds(step) for step in steps])
    onload, publish, offload, refresh = (median(x) for x in zip(*rounds[1:], strict=True))
    return {"onload": onload, "offload": offload, "transfer": publish + refresh}


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
