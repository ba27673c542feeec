"""Combinations of keys, each valid by itself, that cannot run together or not on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from envs.libero.config import LIBERO_TASKS, LiberoConfig
from envs.workload.config import WorkloadConfig
from vla_rl.config.messages import KeyPath, Problem
from vla_rl.config.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Check:
    """A question about a config, and the keys that it reads."""

    reads: tuple[KeyPath, ...]
    find: Callable[[RunConfig], Iterable[Problem]]


def config_checks() -> tuple[Check, ...]:
    """What holds on every machine."""
    return (
        Check((("env",),), _tasks_exist),
        Check((("env",), ("policy", "chunk_size")), _chunk_fits_episode),
        Check((("learner", "betas"),), _betas_below_one),
        Check((("algo",), ("train", "batch_episodes")), _batch_holds_whole_groups),
        Check((("train", "publish_every"), ("train", "max_age"), ("mode",)), _published_before_too_old),
        Check((("placement", "virtual"), ("env",)), _virtual_devices_compute_nothing),
        Check((("placement", "replan_every"), ("placement", "mode")), _replanning_is_free_to_choose),
        Check((("placement",),), _nodes_are_of_a_cluster),
    )


def _tasks_exist(config: RunConfig) -> Iterator[Problem]:
    key = ("env", "tasks")
    tasks: tuple[int | str, ...] = getattr(config.env, "tasks", ())
    if isinstance(config.env, LiberoConfig):
        count = LIBERO_TASKS[config.env.suite]
        absent = [task for task in config.env.tasks if task >= count]
        if absent:
            names = ", ".join(map(str, absent))
            yield Problem(key, f"{config.env.suite} has tasks 0..{count - 1}, not {names}", list(tasks))
    twice = sorted({str(task) for task in tasks if tasks.count(task) > 1})
    if twice:
        yield Problem(key, f"names {', '.join(twice)} more than once; name each task once", list(tasks))


def _chunk_fits_episode(config: RunConfig) -> Iterator[Problem]:
    steps, chunk = config.env.max_episode_steps, config.policy.chunk_size
    if steps is not None and chunk > steps:
        remedy = f"an episode of env.max_episode_steps={steps} would be over within one chunk; use at most {steps}"
        yield Problem(("policy", "chunk_size"), remedy, chunk)


def _betas_below_one(config: RunConfig) -> Iterator[Problem]:
    if max(config.learner.betas) >= 1.0:
        yield Problem(("learner", "betas"), "AdamW needs both below 1, such as [0.9,0.95]", list(config.learner.betas))


def _batch_holds_whole_groups(config: RunConfig) -> Iterator[Problem]:
    episodes, size = config.train.batch_episodes, config.algo.groups.size
    if episodes % size:
        remedy = f"a super-batch holds whole groups of algo.group_size={size}; use a multiple of it"
        yield Problem(("train", "batch_episodes"), remedy, episodes)


def _published_before_too_old(config: RunConfig) -> Iterator[Problem]:
    every, age = config.train.publish_every, config.train.max_age
    if config.mode != "sync" and every > age + 1:
        remedy = f"update {age + 2} would wait for younger data than train.max_age={age} allows; use at most {age + 1}"
        yield Problem(("train", "publish_every"), remedy, every)


def _virtual_devices_compute_nothing(config: RunConfig) -> Iterator[Problem]:
    virtual = config.placement.virtual
    if virtual is not None and not isinstance(config.env, WorkloadConfig):
        yield Problem(
            ("placement", "virtual"), "virtual devices compute nothing: only env=workload runs on them", virtual
        )


def _replanning_is_free_to_choose(config: RunConfig) -> Iterator[Problem]:
    every, mode = config.placement.replan_every, config.placement.mode
    if every and mode != "auto":
        remedy = f"planning anew chooses among all modes, and placement.mode={mode} fixes one; use 0, or mode=auto"
        yield Problem(("placement", "replan_every"), remedy, every)


def _nodes_are_of_a_cluster(config: RunConfig) -> Iterator[Problem]:
    p, key = config.placement, ("placement", "nodes")
    if p.nodes > 1 and p.ray_address is None:
        yield Problem(
            key, "more than this machine needs a running Ray cluster; name its placement.ray_address", p.nodes
        )
    if p.nodes > 1 and p.virtual is not None:
        yield Problem(key, "virtual devices are all on this machine; use 1", p.nodes)
