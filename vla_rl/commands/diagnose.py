"""`vla-rl diagnose CHECKPOINT [CONFIG]`: which convention keeps a policy that succeeds elsewhere from succeeding here.

The policy predicts demonstrated actions as it is used, and with one convention changed at a time. A convention is
called wrong only if another one explains the demonstrations better: clearly, and not by chance.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table

from vla_rl.commands.conventions import PRESENT, Trial, fitted, trials
from vla_rl.commands.demonstrations import demonstration_episode
from vla_rl.commands.evaluate import evaluated_config, local_target
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.hub import is_hub_address
from vla_rl.core.machine import Machine
from vla_rl.core.records import Array, EnvSpec
from vla_rl.observability.console import make_console
from vla_rl.replay.schedule import evaluation_episodes

if TYPE_CHECKING:
    from envs.base import VectorEnv
    from envs.base.demonstration_records import Demonstrations
    from vla_rl.commands.api import LoadedPolicy

_EPISODES, _FRAMES = 16, 64  # of the expert; that are compared
_ENVS = 4  # that play at a time
_LESS = 0.1  # share of the error by which another convention must be better
_CHANCE, _DRAWS = 0.05, 4000  # of calling something wrong that is right, by a bootstrap
_EXPLAINED = 0.9  # share of the mean action's error: one beyond it explains nothing
_LEAST = 4  # episodes that a bootstrap can say something of
_FIGURES = "error", "low", "high"
_CONSTANT = 1e-3  # share of its range in which a number counts as constant


class Finding(NamedTuple):
    """How well a trial explains the demonstrations."""

    trial: Trial
    error: float
    low: float  # how much smaller the error is than as it is, between these limits unless by chance
    high: float


class Subject:
    """The checkpoint, under any trial. One policy at a time is in memory."""

    def __init__(self, config: RunConfig, spec: EnvSpec) -> None:
        from vla_rl.core.devices.settings import set_up_torch

        self._config, self._spec, self._policy = config, spec, None
        self._keys: dict[str, Any] | None = None
        self._device = "cuda" if Machine.detect().gpus else "cpu"
        set_up_torch(self._device, config.sft.threads)

    def under(self, trial: Trial) -> LoadedPolicy:
        """The policy with a trial's keys and instructions. It draws the same numbers each time."""
        from vla_rl.commands.api import LoadedPolicy
        from vla_rl.policies.build import build_policy, torch_dtype

        config = self._config.with_values({f"policy.{name}": value for name, value in trial.policy.items()})
        prompts = config.algo.prompts(trial.instructions or self._spec.instructions)
        if self._policy is None or self._keys != trial.policy:
            self._policy, self._keys = None, dict(trial.policy)  # frees the other one first
            dtype, spec = torch_dtype(config.learner.precision), self._spec
            self._policy = build_policy(config.policy, spec, config.seed, prompts, device=self._device, dtype=dtype)
        self._policy.set_instructions(prompts)
        return LoadedPolicy(self._policy, config, self._spec, self._device)


def _act(policy: LoadedPolicy, trial: Trial, images: Array, proprio: Array, task: Array) -> Array:
    """The most likely actions, float32 [N, K, A], not clipped."""
    return trial.actions(policy.act(trial.images(images), trial.proprio(proprio), task))


def diagnose_command(args: Any) -> int:
    """Compare, print, play. The exit status is 1 if a convention is wrong."""
    from envs import env_spec, make_env
    from envs.base.demonstrations import demonstrations_for
    from vla_rl.policies.build import check_policy

    file, overrides, downloaded = args.config, args.overrides, is_hub_address(args.target)
    if file is not None and "=" in file and not Path(file).exists():
        file, overrides = None, [file, *overrides]
    given = None if file is None else Path(file)
    config = evaluated_config(local_target(args.target), given, overrides, best=False, downloaded=downloaded)
    spec, console, success = env_spec(config.env), make_console(), {}
    check_policy(config.policy, spec)
    demos = None if args.demos is None else demonstrations_for(spec, [args.demos], config.demos)
    env, subject = make_env(config.env, _ENVS), Subject(config, spec)
    logging.disable(logging.WARNING)  # trials would repeat those about words and chunks
    try:
        found, baseline = findings(subject, demos or _of_expert(env, config), config, spec)
        wrong, text = verdict(found, baseline)
        console.print(_table(found, baseline))
        console.print(text, highlight=False, soft_wrap=True)
        for trial in (PRESENT,) if wrong is None else (PRESENT, wrong):
            if args.episodes:
                success[trial.name] = _successes(env, subject, trial, config.seed, args.episodes)
                console.print(
                    f"{trial.name}: {success[trial.name]} of {args.episodes} episodes succeed", highlight=False
                )
    finally:
        logging.disable(logging.NOTSET)
        env.close()
    if args.json:
        rows = [{"name": f.trial.name, "remedy": f.trial.remedy} | dict(zip(_FIGURES, f[1:])) for f in found]
        about = {"checkpoint": config.policy.checkpoint, "wrong": wrong and wrong.name, "text": text}
        write_json(args.json, about | {"mean_action_error": baseline, "trials": rows, "successes": success})
    return int(wrong is not None)


def _of_expert(env: VectorEnv, config: RunConfig) -> Demonstrations:
    """Raises UserError if the simulator has no expert."""
    from envs.base import EnvError
    from envs.base.config import DemosConfig
    from envs.base.demonstrations import collect, demonstrations_for

    episodes = [demonstration_episode(i, len(env.spec.instructions), config.seed) for i in range(_EPISODES)]
    with tempfile.TemporaryDirectory(prefix="vla_rl-diagnose-") as folder:
        try:
            collect(env, episodes, Path(folder) / "expert.hdf5", noise=config.sft.demo_noise)
        except EnvError as error:
            raise UserError(f"{error}; or give demonstrations with --demos DATA") from error
        return demonstrations_for(env.spec, [Path(folder)], DemosConfig())


def findings(subject: Subject, demos: Demonstrations, config: RunConfig, spec: EnvSpec) -> tuple[list[Finding], float]:
    """All trials that change anything, the best first; the error of always predicting the mean action."""
    rows, episode = _spread(demos)
    shown, state, task = demos.images[rows], demos.proprio[rows], demos.task[rows]
    actions, mask = (part[rows] for part in demos.chunks(config.policy.chunk_size))
    wide = actions[mask].std(axis=0)
    varies = wide > _CONSTANT * (spec.actions.high - spec.actions.low)
    if not varies.any():
        raise UserError("all of the demonstrated actions are the same: give others with --demos DATA")

    def errors(predicted: Array) -> Array:
        """[F]: the mean distance of the executed actions from the demonstrated ones, in standard deviations."""
        off = np.abs(spec.actions.clip(predicted) - actions)[..., varies] / wide[varies]
        found: Array = (off.mean(axis=2) * mask).sum(axis=1) / mask.sum(axis=1)
        return found

    present = _act(subject.under(PRESENT), PRESENT, shown, state, task)
    own = errors(present)
    tried = [*fitted(present[mask], actions[mask], spec.actions), *trials(config.policy, spec, state.mean(axis=0))]
    found, numbers = [Finding(PRESENT, float(own.mean()), 0.0, 0.0)], np.unique(episode)
    for trial in tried:
        try:
            alike = trial.actions is not PRESENT.actions  # the policy predicts the same
            error = errors(trial.actions(present) if alike else _act(subject.under(trial), trial, shown, state, task))
        except UserError:  # statistics of another robot
            continue
        if not np.array_equal(error, own):
            gains = [(own - error)[episode == i].mean() for i in numbers]
            found.append(Finding(trial, float(error.mean()), *_interval(np.array(gains), _CHANCE / len(tried))))
    mean = np.broadcast_to(actions[mask].mean(axis=0), actions.shape)
    return sorted(found, key=lambda finding: finding.error), float(errors(mean).mean())


def _spread(demos: Demonstrations) -> tuple[Array, Array]:
    """Rows of some frames, spread over demonstrations and their steps; the number of each one's demonstration."""
    chosen = np.unique(np.linspace(0, demos.num_demonstrations - 1, _FRAMES).astype(int))
    each = -(-_FRAMES // len(chosen))
    rows = [np.unique(np.linspace(*demos.offsets[i : i + 2], each, endpoint=False).astype(int)) for i in chosen]
    return np.concatenate(rows), np.repeat(chosen, list(map(len, rows)))


def _interval(gains: Array, chance: float) -> tuple[float, float]:
    """Of the mean of ``gains`` [n], by a bootstrap over episodes, of which too few prove nothing."""
    if len(gains) < _LEAST:
        return -np.inf, np.inf
    drawn = np.random.default_rng(0).integers(len(gains), size=(_DRAWS, len(gains)))
    low, high = np.quantile(gains[drawn].mean(axis=1), (chance / 2, 1 - chance / 2))
    return float(low), float(high)


def verdict(found: list[Finding], baseline: float) -> tuple[Trial | None, str]:
    """The convention to change to, if one is wrong, and what to say."""
    best, own = found[0], next(finding.error for finding in found if finding.trial is PRESENT)
    if best.error > _EXPLAINED * baseline:
        return None, (
            f"No convention explains it: the best error, {best.error:.2f}, is near that of always predicting the mean "
            f"action, {baseline:.2f}. The policy does not know these demonstrations, or several conventions are wrong"
        )
    if best.low > 0 and best.error < (1 - _LESS) * own:
        return best.trial, f"{best.trial.name} ({best.error:.2f} instead of {own:.2f}): {best.trial.remedy}"
    return (
        None,
        f"No convention is wrong: none explains the demonstrations clearly better than the present ones, {own:.2f}",
    )


def _table(found: list[Finding], baseline: float) -> Table:
    table = Table("convention", title="distance of predicted from demonstrated actions, in standard deviations")
    for name in ("error", "smaller than as it is by"):
        table.add_column(name, justify="right")
    for trial, error, low, high in found:
        table.add_row(trial.name, f"{error:.2f}", "" if trial is PRESENT else f"{low:+.2f} to {high:+.2f}")
    table.add_row("(always the mean action)", f"{baseline:.2f}", "")
    return table


def _successes(env: VectorEnv, subject: Subject, trial: Trial, seed: int, count: int) -> int:
    """How many of ``count`` evaluation episodes succeed."""
    from envs.base import empty_observation

    policy, seen, successes = subject.under(trial), empty_observation(env.spec, _ENVS), 0
    episodes = evaluation_episodes(0, count, len(env.spec.instructions), env.spec.init_states, seed)
    for first in range(0, count, _ENVS):
        running = list(range(min(_ENVS, count - first)))
        env.reset(running, episodes[first : first + _ENVS])
        while running:
            env.observe(running, seen)
            actions = _act(policy, trial, seen.images[running], seen.proprio[running], seen.task[running])
            result = env.step(running, actions.astype(np.float32))
            successes += int(result.success.sum())
            running = [i for i, end in zip(running, result.terminated | result.truncated, strict=True) if not end]
    return successes
