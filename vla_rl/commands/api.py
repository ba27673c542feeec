"""The Python interface: what ``import vla_rl`` offers to scripts and notebooks (docs/api.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.gymnasium.registration import register as register_envs
from vla_rl.config.loading import Source
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.records import Array, EnvSpec, Observation
from vla_rl.core.shipped import find_config
from vla_rl.observability.callbacks import Callback, TrainResult
from vla_rl.placement.checks import load_checked_config

if TYPE_CHECKING:
    from vla_rl.commands.sft import SftResult
    from vla_rl.observability.success_rate import Evaluation
    from vla_rl.policies.base.policy import Policy

__all__ = [
    "LoadedPolicy",
    "evaluate",
    "export",
    "load_config",
    "load_policy",
    "register_envs",
    "report",
    "sft",
    "train",
]

Overrides = Sequence[str] | Mapping[str, Any]
Config = Source | RunConfig


def load_config(source: Source = None, overrides: Overrides = ()) -> RunConfig:
    """Read and check a config: a YAML file, the name of one that comes with vla_rl, a mapping, or None for defaults.

    ``overrides`` are texts as on the command line, ``["train.iterations=2"]``, or a mapping,
    ``{"train.iterations": 2}``. A simulator, policy or algorithm of your own is selected by its class or as
    ``module:Class``. Raises ConfigError, a ValueError, with all mistakes; ``problems`` has them one by one.
    """
    return load_checked_config(source, overrides)


def train(
    config: Config = None,
    overrides: Overrides = (),
    *,
    resume: str | Path | None = None,
    iteration: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train a policy; returns when the run is over.

    Args:
        config: a RunConfig, or what ``load_config`` reads.
        overrides: of its keys; with a RunConfig, a mapping.
        resume: folder of a run to continue, with its own config.
        iteration: with ``resume``, of the checkpoint to continue from; None: the newest.
        callbacks: are told about iterations and checkpoints, and can stop the run.

    Raises UserError (a ValueError) for what you can correct, before any process is started where that is possible, and
    RunError (a RuntimeError) if the run cannot go on. Ctrl-C stops with a checkpoint, as in the command.
    """
    from vla_rl.commands.train import run_training

    folder = None if resume is None else Path(resume)
    if folder is not None:
        if config is not None:
            raise UserError(f"a resumed run has its own config: leave out config, or resume={str(resume)!r}")
        config = folder / "config.yaml"
        if not config.is_file():
            raise UserError(f"resume={str(resume)!r}: no run folder, {config} does not exist")
    elif iteration is not None:
        raise UserError(f"iteration={iteration} names a checkpoint of a run: set resume, too")
    return run_training(_config(config, overrides), folder, iteration, callbacks)


def evaluate(
    target: str | Path,
    episodes: int | None = None,
    *,
    config: Source = None,
    overrides: Overrides = (),
    greedy: bool = True,
    best: bool = False,
    record: int = 0,
    failures: int = 0,
) -> Evaluation:
    """Success rate of a run's newest checkpoint, or of a policy checkpoint.

    Args:
        target: folder of a run or of a checkpoint.
        episodes: over all tasks together; None: train.eval_episodes.
        config: of the simulator; None: the run's own.
        overrides: of its keys.
        greedy: take the most likely actions; False: sample.
        best: of a run, the best checkpoint by its evaluations.
        record: episodes to keep the frames of, for ``Evaluation.film``: the first ones.
        failures: in place of ``record``: as many, failures first, each played again from its start.

    Raises as ``train``.
    """
    from vla_rl.commands.evaluate import evaluate_policy

    if record and failures:
        raise UserError(f"record={record} and failures={failures} are two choices of what is filmed: leave one out")
    found = _evaluated(target, config, overrides, best=best)
    count = episodes or found.train.eval_episodes or 50
    return evaluate_policy(found, count, greedy=greedy, record=record, failures=failures)


def sft(config: Config = None, overrides: Overrides = ()) -> SftResult:
    """Warm-start a policy from demonstrations, by behaviour cloning; returns its checkpoint, evaluated.

    ``config``: a RunConfig, or what ``load_config`` reads; its group ``sft`` says what is cloned, and where to.
    ``overrides``: of its keys; with a RunConfig, a mapping. Raises as ``train``.
    """
    from vla_rl.commands.sft import run_sft

    return run_sft(config.model_dump(mode="json") if isinstance(config, RunConfig) else config, overrides)


def export(
    target: str | Path,
    output: str | Path,
    *,
    format: str = "native",
    source: str | None = None,
    unnorm_key: str | None = None,
    chunk_size: int | None = None,
    decoding: str | None = None,
    views: int | None = None,
) -> Path:
    """Write a policy in a layout that other projects read, or in this project's own; returns ``output``.

    Args:
        target: folder of a run, whose newest checkpoint is taken, or of a checkpoint.
        output: a new folder.
        format: "native", or a layout of the policy (docs/policies.md), listed if the policy lacks it.
        source: published checkpoint that training began with; None: the run's policy.checkpoint.
        unnorm_key: data set whose statistics to read or to write.
        chunk_size, decoding, views: of a published checkpoint, whose files do not say it.

    Raises UserError.
    """
    from vla_rl.commands.export import export_target

    options = {"source": source, "unnorm_key": unnorm_key, "chunk_size": chunk_size, "decoding": decoding}
    export_target(Path(target), Path(output), format, options | {"views": views})
    return Path(output)


def report(*runs: str | Path, output: str | Path | None = None) -> Path:
    """Write what came out of a run, or of several in comparison, as a page of HTML; returns its file.

    ``runs``: run folders, also of runs that are running, or copies of a ``metrics.jsonl``. ``output``: None stands for
    ``report.html``, of one run in its folder, of several in the working directory. Raises UserError if there is nothing
    to report.
    """
    from vla_rl.commands.report import write_report

    return write_report([Path(run) for run in runs], None if output is None else Path(output))


def load_policy(
    target: str | Path,
    *,
    config: Source = None,
    overrides: Overrides = (),
    best: bool = False,
    device: str = "cpu",
) -> LoadedPolicy:
    """The policy of a run's newest checkpoint, or of a policy checkpoint, to act with. Arguments as ``evaluate``."""
    from envs import env_spec
    from vla_rl.policies.build import build_policy

    found = _evaluated(target, config, overrides, best=best)
    spec = env_spec(found.env)
    prompts = found.algo.prompts(spec.instructions)
    return LoadedPolicy(build_policy(found.policy, spec, found.seed, prompts, device=device), found, spec, device)


class LoadedPolicy:
    """A policy with its weights: observations in, action chunks out, all of it numpy."""

    def __init__(self, policy: Policy, config: RunConfig, spec: EnvSpec, device: str) -> None:
        from vla_rl.inference.policy_runner import PolicyRunner

        self.policy, self.config, self.spec = policy, config, spec
        self._runner = PolicyRunner(policy, config, None, device)
        self._rng = np.random.default_rng(config.seed)

    @property
    def instructions(self) -> tuple[str, ...]:
        """One for each task."""
        return self.spec.instructions

    def act(
        self, images: Array, proprio: Array | None = None, task: int | str | Array = 0, *, greedy: bool = True
    ) -> Array:
        """Action chunks float32 [N, K, A] for N observations; [K, A] for one.

        Args:
            images: uint8 [N, V, H, W, 3], upright; [V, H, W, 3] for one.
            proprio: float32 [N, P] or [P]; None where the policy reads none.
            task: number or instruction, for all rows; or int [N].
            greedy: take the most likely actions; False: sample.

        Raises ValueError for wrong shapes, KeyError for an instruction that is not the simulator's.
        """
        single = images.ndim == 4
        images = images[None] if single else images
        n = len(images)
        wanted = (n, len(self.spec.views), self.spec.image_size, self.spec.image_size, 3)
        if images.shape != wanted or images.dtype != np.uint8:
            raise ValueError(f"images are {images.dtype} {list(images.shape)}: need uint8 {list(wanted)}")
        seen = np.zeros((n, 0), np.float32) if proprio is None else np.asarray(proprio, np.float32).reshape(n, -1)
        if seen.shape[1] != self.spec.proprio_dim:
            raise ValueError(f"proprio has {seen.shape[1]} numbers a row: need {self.spec.proprio_dim}")
        tasks = np.broadcast_to(np.asarray(self._task(task), np.int32), (n,)).copy()
        draws = self.config.policy.spec(self.spec).draws
        numbers = {name: np.stack([one.draw(self._rng) for _ in range(n)]) for name, one in draws.items()}
        rows = Observation(np.ascontiguousarray(images), seen, tasks, np.zeros(n, np.float32))
        actions = self._runner.act(rows, numbers, np.full(n, greedy)).actions
        return actions[0] if single else actions

    def _task(self, task: int | str | Array) -> int | Array:
        if not isinstance(task, str):
            return task
        if task not in self.instructions:
            raise KeyError(f"{task!r} is none of the policy's instructions: {'; '.join(self.instructions)}")
        return self.instructions.index(task)


def _config(config: Config, overrides: Overrides) -> RunConfig:
    if not isinstance(config, RunConfig):
        return load_checked_config(config, overrides)
    return load_checked_config(config.model_dump(mode="json"), overrides)


def _evaluated(target: str | Path, config: Source, overrides: Overrides, *, best: bool) -> RunConfig:
    from vla_rl.commands.evaluate import config_of_target

    if isinstance(config, Mapping):
        raise UserError("config is a mapping: give a file, or the name of one, and the rest as overrides")
    file = None if config is None else find_config(config)
    return config_of_target(str(target), file, _texts(overrides), give='config="NAME_OR_FILE"', best=best)


def _texts(overrides: Overrides) -> list[str]:
    """Overrides as on the command line."""
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    return list(overrides)
