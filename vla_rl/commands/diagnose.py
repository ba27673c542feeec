"""`vla-rl diagnose CHECKPOINT [CONFIG]`: which convention keeps a policy that succeeds elsewhere from succeeding here.

The policy predicts demonstrated actions as it is used, and with one convention changed at a time. A convention is
called wrong only if another one explains the demonstrations better: clearly, and not by chance.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from envs import env_spec, make_env
from envs.base import EnvError, VectorEnv, empty_observation
from envs.base.config import DemosConfig
from envs.base.demonstrations import Demonstrations, collect, demonstrations_for
from vla_rl.commands.api import LoadedPolicy
from vla_rl.commands.conventions import PRESENT, Trial, fitted, trials
from vla_rl.commands.demonstrations import demonstration_episode
from vla_rl.commands.evaluate import config_of_arguments
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.machine import Machine
from vla_rl.core.records import Array, EnvSpec
from vla_rl.observability.console import make_console
from vla_rl.policies.build import build_policy, check_policy, torch_dtype
from vla_rl.replay.schedule import evaluation_episodes

_EPISODES, _FRAMES = 16, 64  # of the expert; that are compared
_ENVS = 4  # that play at a time
_LESS = 0.1  # share of the error by which another convention must be better
_CHANCE, _DRAWS = 0.05, 4000  # of calling something wrong that is right, by a bootstrap
_LEAST = 8  # episodes to draw from
_EXPLAINED = 0.9  # share of the mean action's error: one beyond it explains nothing
_CONSTANT = 1e-3  # share of its range in which a number counts as constant


def diagnose_command(args: Any) -> int:
    """Compare, print, play. The exit status is 1 if a convention is wrong."""
    config = config_of_arguments(args)
    spec, console, success = env_spec(config.env), make_console(), {}
    check_policy(config.policy, spec)
    demos = None if args.demos is None else demonstrations_for(spec, [args.demos], config.demos)
    env = make_env(config.env, _ENVS)
    logging.disable(logging.WARNING)  # trials would repeat those about words and chunks
    try:
        demos = demos or _of_expert(env, config)  # may find that there is no expert: before the policy is loaded
        policy = under(PRESENT, config, spec)
        found, baseline = compared(policy, demos, spec)
        wrong, text = verdict(found, baseline)
        console.print(_table(found, baseline))
        console.print(text, highlight=False, soft_wrap=True)
        for trial in [PRESENT, *filter(None, [wrong])] if args.episodes else []:
            success[trial.name] = _successes(env, under(trial, config, spec, policy), trial, args.episodes)
            console.print(f"{trial.name}: {success[trial.name]} of {args.episodes} episodes succeed", highlight=False)
        if wrong is not None and success and success[wrong.name] < success[PRESENT.name]:
            console.print("Fewer episodes succeed so: keep the present setting, and play more episodes of both")
    finally:
        logging.disable(logging.NOTSET)
        env.close()
    if args.json:
        rows = [{name: getattr(trial, name) for name in ("name", "remedy", "error", "smaller")} for trial in found]
        about = {"checkpoint": config.policy.checkpoint, "wrong": wrong and wrong.name, "text": text}
        write_json(args.json, about | {"mean_action_error": baseline, "trials": rows, "successes": success})
    return int(wrong is not None)


def _of_expert(env: VectorEnv, config: RunConfig) -> Demonstrations:
    """Raises UserError if the simulator has no expert."""
    episodes = [demonstration_episode(i, len(env.spec.instructions), config.seed) for i in range(_EPISODES)]
    with tempfile.TemporaryDirectory(prefix="vla_rl-diagnose-") as folder:
        try:
            collect(env, episodes, Path(folder) / "expert.hdf5", noise=config.sft.demo_noise)
        except EnvError as error:
            raise UserError(f"{error}; or give demonstrations with --demos DATA") from error
        return demonstrations_for(env.spec, [Path(folder)], DemosConfig())


def under(trial: Trial, config: RunConfig, spec: EnvSpec, present: LoadedPolicy | None = None) -> LoadedPolicy:
    """The checkpoint with a trial's keys and instructions. It draws the same numbers each time.

    ``present``: its weights are used again if the trial has no keys. Raises UserError if there is no such policy.
    """
    from vla_rl.core.devices.settings import set_up_torch

    config = config.with_values({f"policy.{name}": value for name, value in trial.policy.items()})
    prompts = config.algo.prompts(trial.instructions or spec.instructions)
    device, dtype = "cuda" if Machine.detect().gpus else "cpu", torch_dtype(config.learner.precision)
    set_up_torch(device, config.sft.threads, config.learner.matmul)
    if present is None or trial.policy:
        policy = build_policy(config.policy, spec, config.seed, prompts, device=device, dtype=dtype)
    else:
        policy = present.policy
    policy.set_instructions(prompts)
    return LoadedPolicy(policy, config, spec, device)


def _act(policy: LoadedPolicy, trial: Trial, images: Array, proprio: Array, task: Array) -> Array:
    """The most likely actions, float32 [N, K, A], not clipped."""
    return trial.actions(policy.act(trial.images(images), trial.proprio(proprio), task))


def compared(policy: LoadedPolicy, demos: Demonstrations, spec: EnvSpec) -> tuple[list[Trial], float]:
    """All trials that change anything, the best first; the error of always predicting the mean action."""
    rows, episode = _spread(demos)
    seen = demos.images[rows], demos.proprio[rows], demos.task[rows]
    actions, mask = (part[rows] for part in demos.chunks(policy.config.policy.chunk_size))
    wide = actions[mask].std(axis=0)
    varies = wide > _CONSTANT * (spec.actions.high - spec.actions.low)
    if not varies.any():
        raise UserError("all of the demonstrated actions are the same: give others with --demos DATA")

    def errors(predicted: Array) -> Array:
        """[F]: the mean distance of the executed actions from the demonstrated ones, in standard deviations."""
        off = np.abs(spec.actions.clip(predicted) - actions)[..., varies] / wide[varies]
        found: Array = (off.mean(axis=2) * mask).sum(axis=1) / mask.sum(axis=1)
        return found

    def together(predicted: Array) -> Array:
        """[F]: the covariance of how predicted and demonstrated actions change from step to step."""
        ours, theirs = (np.diff(x, axis=1)[..., varies] / wide[varies] for x in (spec.actions.clip(predicted), actions))
        found: Array = ((ours * theirs).mean(axis=2) * mask[:, 1:]).sum(axis=1)
        return found

    present = _act(policy, PRESENT, *seen)
    own, found = errors(present), []
    others = trials(policy.config.policy, spec, seen[1].mean(axis=0))
    tried = [PRESENT, *fitted(present[mask], actions[mask], spec.actions), *others]
    for trial in tried:
        try:
            predicted = trial.actions(present)
            if trial.actions is PRESENT.actions and trial is not PRESENT:  # it changes what the policy reads
                predicted = _act(under(trial, policy.config, spec, policy), trial, *seen)
        except UserError:  # statistics of another robot
            continue
        error = errors(predicted)
        if trial is PRESENT or not np.array_equal(error, own):
            chance = _CHANCE / len(tried)
            smaller = _interval(own - error, episode, chance)
            in_time = trial.timing and _interval(together(predicted) - together(present), episode, chance)[0] > 0
            found.append(trial._replace(error=float(error.mean()), smaller=smaller, in_time=in_time))
    mean = np.broadcast_to(actions[mask].mean(axis=0), actions.shape)
    return sorted(found, key=lambda trial: trial.error), float(errors(mean).mean())


def _spread(demos: Demonstrations) -> tuple[Array, Array]:
    """Rows of some frames, spread over demonstrations and their steps; the number of each one's demonstration."""
    chosen = np.unique(np.linspace(0, demos.num_demonstrations - 1, _FRAMES).astype(int))
    share = np.arange(each := -(-_FRAMES // len(chosen))) / each
    start, end = demos.offsets[chosen, None], demos.offsets[chosen + 1, None]
    return (start + share * (end - start)).astype(int).ravel(), np.repeat(chosen, each)


def _interval(gains: Array, episodes: Array, chance: float) -> tuple[float, float]:
    """Of the mean of ``gains`` [F], by a bootstrap over episodes; over frames if there are few episodes."""
    numbers = np.unique(episodes)
    means = np.array([gains[episodes == i].mean() for i in numbers]) if len(numbers) >= _LEAST else gains
    drawn = np.random.default_rng(0).integers(len(means), size=(_DRAWS, len(means)))
    low, high = np.quantile(means[drawn].mean(axis=1), (chance / 2, 1 - chance / 2))
    return float(low), float(high)


def verdict(found: list[Trial], baseline: float) -> tuple[Trial | None, str]:
    """The convention to change to, if one is wrong, and what to say."""
    best, own = found[0], next(trial.error for trial in found if trial.name == PRESENT.name)
    if best.error > _EXPLAINED * baseline:
        return None, (
            f"No convention explains it: the best error, {best.error:.2f}, is near that of always predicting the mean "
            f"action, {baseline:.2f}. The policy does not know these demonstrations, or several conventions are wrong"
        )
    for trial in found:
        if trial.smaller[0] > 0 and (trial.in_time or trial.error < (1 - _LESS) * own):
            return trial, f"{trial.name} (error {trial.error:.2f} instead of {own:.2f}): {trial.remedy}"
    return None, f"No convention is wrong: no other one explains the demonstrations clearly better (error {own:.2f})"


def _table(found: list[Trial], baseline: float) -> Table:
    table = Table("convention", title="distance of predicted from demonstrated actions, in standard deviations")
    for name in ("error", "smaller than as it is by"):
        table.add_column(name, justify="right")
    for trial in found:
        table.add_row(trial.name, f"{trial.error:.2f}", "{:+.2f} to {:+.2f}".format(*trial.smaller))
    table.add_row("(always the mean action)", f"{baseline:.2f}", "")
    return table


def _successes(env: VectorEnv, policy: LoadedPolicy, trial: Trial, count: int) -> int:
    """How many of ``count`` evaluation episodes succeed."""
    seen, successes, spec = empty_observation(env.spec, _ENVS), 0, env.spec
    episodes = evaluation_episodes(0, count, len(spec.instructions), spec.init_states, policy.config.seed)
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
