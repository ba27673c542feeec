"""`vla-rl diagnose CHECKPOINT [CONFIG]`: which convention keeps a policy that succeeds elsewhere from succeeding here.

The policy predicts the actions of demonstrations, as it is used and with one convention changed at a time. A
convention is called wrong only if another one explains the demonstrations better, beyond chance and clearly.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from vla_rl.commands.conventions import PRESENT, Trial, fitted, trials
from vla_rl.commands.demonstrations import demonstration_episode
from vla_rl.commands.evaluate import config_of_run, evaluated_config, local_target
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.hub import is_hub_address
from vla_rl.core.machine import Machine
from vla_rl.core.records import Array, EnvSpec, Observation
from vla_rl.observability.console import make_console
from vla_rl.replay.schedule import evaluation_episodes

if TYPE_CHECKING:
    from envs.base import VectorEnv
    from envs.base.demonstration_records import Demonstrations
    from vla_rl.inference.policy_runner import PolicyRunner

_EPISODES, _FRAMES = 16, 64  # of the expert; compared, of all demonstrations
_BATCH = 16  # frames of one inference
_LESS = 0.1  # share of the error by which another convention must be better
_CHANCE = 0.05  # that any right setting is called wrong
_RESAMPLED = 4000
_EXPLAINED = 0.9  # an error beyond this share of the mean action's explains nothing
_CONSTANT = 1e-3  # share of its range below which a number is constant in the demonstrations


@dataclass(frozen=True, slots=True)
class Frames:
    """F frames of demonstrations: what was seen, the K actions that follow, and what settles the policy's samples."""

    seen: Observation
    actions: Array  # float32 [F, K, A]
    mask: Array  # bool [F, K], false after the end of a demonstration
    episode: Array  # int [F]
    numbers: dict[str, Array]  # [F, ...] each, as in ``PolicySpec.draws``

    @classmethod
    def of(cls, demos: Demonstrations, config: RunConfig, spec: EnvSpec) -> Frames:
        """Spread evenly over the demonstrations, and over the steps of each."""
        chosen = np.unique(np.linspace(0, demos.num_demonstrations - 1, _FRAMES).astype(int))
        steps = -(-_FRAMES // len(chosen))
        ends = zip(demos.offsets[chosen], demos.offsets[chosen + 1], strict=True)
        per_episode = [np.unique(np.linspace(start, end - 1, steps + 2).astype(int)[:-1]) for start, end in ends]
        rows, rng = np.concatenate(per_episode), np.random.default_rng(config.seed)
        actions, mask = demos.chunks(config.policy.chunk_size)
        draws = config.policy.spec(spec).draws
        return cls(
            Observation(demos.images[rows], demos.proprio[rows], demos.task[rows], np.zeros(len(rows), np.float32)),
            actions[rows],
            mask[rows],
            np.repeat(chosen, list(map(len, per_episode))),
            {name: np.stack([one.draw(rng) for _ in rows]) for name, one in draws.items()},
        )

    def errors(self, predicted: Array, spec: EnvSpec) -> Array:
        """float64 [F]: the mean distance of the executed actions from the demonstrated ones, in standard deviations."""
        spread = self.actions[self.mask].std(axis=0)
        moves = spread > _CONSTANT * (spec.actions.high - spec.actions.low)
        if not moves.any():
            raise UserError("all of the demonstrated actions are the same: name other demonstrations with --demos")
        off = np.abs(spec.actions.clip(predicted) - self.actions)[..., moves] / spread[moves]
        found: Array = (off.mean(axis=2) * self.mask).sum(axis=1) / self.mask.sum(axis=1)
        return found


class Subject:
    """The checkpoint under any trial; one policy at a time is in memory."""

    def __init__(self, config: RunConfig, spec: EnvSpec) -> None:
        self._config, self._spec = config, spec
        self._device = "cuda" if Machine.detect().gpus else "cpu"
        self._runner: tuple[dict[str, Any], PolicyRunner] | None = None

    def act(self, trial: Trial, seen: Observation, numbers: dict[str, Array]) -> Array:
        """The most likely actions, float32 [N, K, A], not clipped. Raises UserError if there is no such policy."""
        runner = self._loaded(dict(trial.policy))
        prompts = self._config.algo.prompts(trial.instructions(self._spec.instructions))
        if runner.policy.instructions != prompts:
            runner.policy.set_instructions(prompts)
        images, proprio = np.ascontiguousarray(trial.images(seen.images)), trial.proprio(seen.proprio)
        parts = []
        for first in range(0, len(images), _BATCH):
            row = slice(first, first + _BATCH)
            rows = Observation(images[row], proprio[row], seen.task[row], seen.elapsed[row])
            greedy = np.ones(len(rows.task), bool)
            parts.append(runner.act(rows, {name: x[row] for name, x in numbers.items()}, greedy).actions)
        found: Array = trial.actions(np.concatenate(parts))
        return found

    def _loaded(self, keys: dict[str, Any]) -> PolicyRunner:
        from vla_rl.inference.policy_runner import PolicyRunner
        from vla_rl.policies.build import build_policy, torch_dtype

        if self._runner is None or self._runner[0] != keys:
            self._runner = None  # before another one is loaded
            config = self._config.with_values({f"policy.{name}": value for name, value in keys.items()})
            prompts, dtype = config.algo.prompts(self._spec.instructions), torch_dtype(config.learner.precision)
            policy = build_policy(config.policy, self._spec, config.seed, prompts, device=self._device, dtype=dtype)
            self._runner = keys, PolicyRunner(policy, config, None, self._device)
        return self._runner[1]


@dataclass(frozen=True, slots=True)
class Finding:
    """How well a trial explains the demonstrations."""

    trial: Trial
    error: float
    gain: tuple[float, float]  # how much less than as it is, between these limits unless by chance


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All trials, the best first; ``wrong`` is the one to change to, if a convention is wrong."""

    findings: tuple[Finding, ...]
    mean_action: float  # the error of always predicting the mean action
    wrong: Trial | None
    text: str

    def table(self) -> Table:
        table = Table(title="distance of predicted from demonstrated actions, in standard deviations")
        for name in ("convention", "error", "less than as it is"):
            table.add_column(name, justify="left" if name == "convention" else "right")
        for finding in self.findings:
            gain = "" if finding.trial is PRESENT else f"{finding.gain[0]:+.2f} to {finding.gain[1]:+.2f}"
            table.add_row(finding.trial.name, f"{finding.error:.2f}", gain)
        table.add_row("(always the mean action)", f"{self.mean_action:.2f}", "", style="dim")
        return table

    def record(self) -> dict[str, Any]:
        """JSON-able."""
        rows = [
            {"name": f.trial.name, "error": f.error, "gain": f.gain, "remedy": f.trial.remedy} for f in self.findings
        ]
        wrong = None if self.wrong is None else self.wrong.name
        return {"wrong": wrong, "text": self.text, "mean_action_error": self.mean_action, "trials": rows}


def diagnose_command(args: Any) -> int:
    """Compare, print, play. The exit status is 1 if a convention is wrong."""
    from envs import env_spec, make_env
    from vla_rl.policies.build import check_policy

    config, console = _config_of(args), make_console()
    spec = env_spec(config.env)
    check_policy(config.policy, spec)
    if args.demos is not None and not args.demos.exists():
        raise UserError(
            f"--demos {args.demos} does not exist: name an HDF5 file, a folder of such, or a LeRobot data set"
        )
    env = make_env(config.env, max(1, min(args.episodes, 4)))
    try:
        frames, subject = Frames.of(_demonstrations(env, config, args.demos), config, spec), Subject(config, spec)
        found = diagnosis(subject, frames, config, spec)
        console.print(found.table())
        console.print(found.text, highlight=False, soft_wrap=True)
        success = {}
        for trial in [PRESENT] + [found.wrong] * (found.wrong is not None) if args.episodes else []:
            success[trial.name] = _successes(env, subject, trial, config, args.episodes)
            console.print(f"{trial.name}: {success[trial.name]} of {args.episodes} episodes succeed", highlight=False)
    finally:
        env.close()
    if args.json:
        source = {"checkpoint": config.policy.checkpoint, "frames": len(frames.mask), "episodes": args.episodes}
        write_json(args.json, source | found.record() | {"successes": success})
    return int(found.wrong is not None)


def _config_of(args: Any) -> RunConfig:
    """As `vla-rl eval` finds it. Raises UserError."""
    file, overrides = args.config, args.overrides
    if file is not None and "=" in file and not Path(file).exists():
        file, overrides = None, [file, *overrides]
    target = local_target(args.target)
    if file is None and config_of_run(target) is None:
        raise UserError(
            f"{target}: neither a run folder nor a checkpoint of a run, so its simulator is unknown; name a config after "
            f"it, such as `vla-rl diagnose {args.target} libero_ppo`"
        )
    given = None if file is None else Path(file)
    return evaluated_config(target, given, overrides, best=False, downloaded=is_hub_address(args.target))


def _demonstrations(env: VectorEnv, config: RunConfig, data: Path | None) -> Demonstrations:
    """Those given, or some of the simulator's expert. Raises UserError."""
    from envs.base import EnvError
    from envs.base.config import DemosConfig
    from envs.base.demonstrations import collect, demonstrations_for

    if data is not None:
        return demonstrations_for(env.spec, [data], config.demos)
    episodes = [demonstration_episode(i, len(env.spec.instructions), config.seed) for i in range(_EPISODES)]
    with tempfile.TemporaryDirectory(prefix="vla_rl-diagnose-") as folder:
        path = Path(folder) / "expert.hdf5"
        try:
            collect(env, episodes, path, noise=config.sft.demo_noise)
        except EnvError as error:
            raise UserError(f"{error}; or give demonstrations with --demos DATA") from error
        return demonstrations_for(env.spec, [path], DemosConfig())


def diagnosis(subject: Subject, frames: Frames, config: RunConfig, spec: EnvSpec) -> Diagnosis:
    """Try all conventions on the frames."""
    with _quiet():
        present = subject.act(PRESENT, frames.seen, frames.numbers)
        own = frames.errors(present, spec)
        tried = trials(config.policy, spec, frames.seen.proprio.mean(axis=0))
        tried += fitted(present[frames.mask], frames.actions[frames.mask], spec.actions)
        errors = {PRESENT.name: (PRESENT, own)}
        for trial in sorted(tried, key=lambda trial: bool(trial.policy)):  # the policy as it is first
            predicted = (
                trial.actions(present) if trial.sees_the_same else subject.act(trial, frames.seen, frames.numbers)
            )
            if not np.array_equal(predicted, present):
                errors[trial.name] = trial, frames.errors(predicted, spec)
    chance = _CHANCE / max(1, len(errors) - 1)
    findings = sorted(
        (Finding(t, float(e.mean()), _interval(own - e, frames.episode, chance)) for t, e in errors.values()),
        key=lambda finding: finding.error,
    )
    mean = frames.actions[frames.mask].mean(axis=0)
    baseline = float(frames.errors(np.broadcast_to(mean, frames.actions.shape), spec).mean())
    return _judged(findings, float(own.mean()), baseline)


def _interval(gains: Array, episodes: Array, chance: float) -> tuple[float, float]:
    """Of the mean of ``gains`` [F], by a bootstrap over episodes; over frames if there are few episodes."""
    numbers = np.unique(episodes)
    means = gains if len(numbers) < _EPISODES // 2 else np.array([gains[episodes == i].mean() for i in numbers])
    drawn = np.random.default_rng(0).integers(len(means), size=(_RESAMPLED, len(means)))
    low, high = np.quantile(means[drawn].mean(axis=1), (chance / 2, 1 - chance / 2))
    return float(low), float(high)


def _judged(findings: Sequence[Finding], own: float, baseline: float) -> Diagnosis:
    best, wrong = findings[0], None
    better = best.trial is not PRESENT and best.gain[0] > 0 and best.error < (1 - _LESS) * own
    if best.error > _EXPLAINED * baseline:
        text = (
            f"No convention explains it: the best error, {best.error:.2f}, is near that of always predicting the mean "
            f"action, {baseline:.2f}. The policy does not know these demonstrations: see whether checkpoint and simulator "
            "belong together, and try one wrong convention after the other (docs/diagnose.md)"
        )
    elif better:
        wrong = best.trial
        text = f"{wrong.name}: {wrong.remedy} (error {best.error:.2f} instead of {own:.2f})"
    else:
        text = (
            f"No convention is wrong: none explains the demonstrations clearly better than the present ones ({own:.2f})"
        )
    return Diagnosis(tuple(findings), baseline, wrong, text)


def _successes(env: VectorEnv, subject: Subject, trial: Trial, config: RunConfig, count: int) -> int:
    """How many of ``count`` evaluation episodes succeed."""
    from envs.base import empty_observation

    spec, draws, rng = env.spec, config.policy.spec(env.spec).draws, np.random.default_rng(config.seed)
    episodes = evaluation_episodes(0, count, len(spec.instructions), spec.init_states, config.seed)
    seen, successes = empty_observation(spec, env.num_envs), 0
    for first in range(0, count, env.num_envs):
        running = list(range(min(env.num_envs, count - first)))
        env.reset(running, episodes[first : first + len(running)])
        while running:
            env.observe(running, seen)
            rows = Observation(seen.images[running], seen.proprio[running], seen.task[running], seen.elapsed[running])
            numbers = {name: np.stack([one.draw(rng) for _ in running]) for name, one in draws.items()}
            result = env.step(running, subject.act(trial, rows, numbers))
            successes += int(result.success.sum())
            running = [i for i, end in zip(running, result.terminated | result.truncated, strict=True) if not end]
    return successes


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, which trials of instructions and chunks would repeat."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
