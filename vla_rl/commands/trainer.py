"""What the main loop of a training run does: one method for each step, over a started cluster."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from vla_rl.cluster.calls import StoreLost
from vla_rl.cluster.cluster import Cluster
from vla_rl.commands.divergence import DivergenceGuard
from vla_rl.commands.evaluate import STALL_S, run_evaluations
from vla_rl.commands.loggers import guarded
from vla_rl.commands.metadata import metadata
from vla_rl.commands.run_folder import RunFolder
from vla_rl.commands.saving import Saving
from vla_rl.commands.signals import StopRequest
from vla_rl.commands.why import last_words
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RunError, StallError
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec, Trajectory
from vla_rl.observability.callbacks import Callback
from vla_rl.observability.console import TrainingView
from vla_rl.observability.meter import Meter
from vla_rl.observability.spans import SpanLog
from vla_rl.observability.usage import Throughput, resident_gib, swapped_gib
from vla_rl.placement.memory import expected_memory
from vla_rl.placement.plan import Plan, PlanError
from vla_rl.placement.planner import layout_record
from vla_rl.placement.replan import Migration, Replanner
from vla_rl.replay.super_batch import describe
from vla_rl.world_model.audit import LEAST_CHUNKS

_DRAIN_POLL_S = 0.2
P = ParamSpec("P")
R = TypeVar("R")


def _timed(step: Callable[Concatenate[Trainer, P], R]) -> Callable[Concatenate[Trainer, P], R]:
    """A step of the main loop, which the trainer's meter times."""

    @wraps(step)
    def timed(trainer: Trainer, *args: P.args, **kwargs: P.kwargs) -> R:
        with trainer.meter.time(step.__name__):
            return step(trainer, *args, **kwargs)

    return timed


class Trainer:
    """One training run on one cluster."""

    def __init__(
        self,
        config: RunConfig,
        spec: EnvSpec,
        folder: RunFolder,
        cluster: Cluster,
        view: TrainingView,
        stop: StopRequest,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.spec, self.folder = config, spec, folder
        self.cluster, self.view, self.stop, self.callbacks = cluster, view, stop, callbacks
        self.policy_version = 0  # updates done: the version of the learner's weights
        self.published_version = 0  # the version that inference acts with
        self._shows_average = False  # whether it acts with the average of that version's weights
        self.restarts = 0  # of the run, in this session
        self.meter = Meter(spans=SpanLog("driver", 0, 0) if config.log.trace else None)
        self._guard = DivergenceGuard(folder.path, config.learner.max_skipped_updates, folder.checkpoints)
        self._longest_update = 0.0  # seconds
        self._saving: Saving | None = None  # the checkpoint that is being written
        self._saving_s = 0.0  # for which checkpoints have held up the main loop since the last log
        self._started = time.monotonic()
        self._earlier_s = 0.0  # training time of earlier sessions of this run
        self._throughput = Throughput()
        self._imagines = False  # whether the world model passed its audit when it was asked last
        self._outline: dict[str, Any] = {}  # of the store: what a new one would go on from
        self._outcomes = (0, 0)  # training episodes played and succeeded, at the previous iteration
        self._replanner: Replanner

    def start(self, checkpoint: Path | None, state: dict[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """Start all processes, continue from a checkpoint if there is one, and let episodes begin.

        ``trajectories``: of the checkpoint. Meanwhile, a signal interrupts at once.
        """
        self.view.status("starting: processes")
        self.cluster.notify, self.cluster.status = self.view.say, self.view.status
        self.cluster.meanwhile = self.settle
        self.stop.graceful = False
        self.stop.listen()  # again, since Ray has been started
        self.policy_version = self.published_version = state["policy_version"]
        self._earlier_s = state["seconds"]
        self.cluster.start(checkpoint / "learner" if checkpoint else None, self.policy_version)
        memory = expected_memory(self.config, self.spec, Machine.detect())
        name = self.folder.path.name
        self._replanner = Replanner(self.config, self.spec, name, memory, state.get("replanner"))
        if checkpoint:
            self.cluster.call_store("restore", state["store"], trajectories)
        self._outline = self.cluster.call_store("outline")
        self._outcomes = self._outline["played"], self._outline["succeeded"]
        self.folder.begin()
        self.cluster.call_store("open")
        self.stop.become_graceful()

    def due(self, every: int) -> bool:
        """Whether something that happens every so many updates happens now; never with 0."""
        return every > 0 and self.policy_version % every == 0

    def is_last(self) -> bool:
        """Whether the run is over: all iterations are done, or its time is up, but not before the first update."""
        train = self.config.train
        in_time = train.max_minutes is None or self._elapsed() <= 60 * train.max_minutes
        return self.policy_version >= train.iterations or (self.policy_version > 0 and not in_time)

    def has_converged(self) -> bool:
        """Whether ``train.patience`` evaluations have brought no higher success."""
        patience = self.config.train.patience
        return patience > 0 and self.folder.evaluations_since_best() >= patience

    def improved(self) -> bool:
        """Whether the checkpoint of this iteration is one to keep: it has the highest success so far."""
        return self.config.train.keep_best and self.folder.best_iteration() == self.policy_version

    @_timed
    def next_batch(self) -> Any:
        """A reference to the next super-batch; None if the run is asked to stop meanwhile."""
        deadline, progress = time.monotonic() + STALL_S, -1
        while not self.stop.requested:
            if wanted := self.cluster.wanted:
                self.view.status(f"waiting for env hosts: {wanted}")
                self.cluster.watch(1.0)
                deadline = time.monotonic() + STALL_S
                continue
            ref: Any = self.cluster.store.next_batch.remote(2.0)
            try:
                with self.cluster.asking_store():
                    is_filled = self.cluster.get(ref, "the next super-batch", 120.0) is not None
                if is_filled:
                    self._outline = self.cluster.call_store("outline")
                    self.cluster.progressed()
                    return ref
                counters = self.cluster.call_store("counters")
            except StoreLost as lost:
                self._replace_store(lost)
                continue
            building, running = self.cluster.building(), counters["running"]
            self.view.status(
                f"filling the next super-batch: {counters['buffered']} of {self.config.train.batch_episodes} episodes, "
                + (f"{building} ready" if building else f"{running} running")
            )
            if counters["started"] + counters["buffered"] != progress:
                progress, deadline = counters["started"] + counters["buffered"], time.monotonic() + STALL_S
            if time.monotonic() > deadline:
                raise StallError(f"no episode finished for {STALL_S:.0f} s; the store's counters: {counters}")
        return None

    def ask_store(self, method: str, *args: Any) -> Any:
        """``Cluster.call_store``; a store that has died is replaced first."""
        try:
            return self.cluster.call_store(method, *args)
        except StoreLost as lost:
            self._replace_store(lost)
            return self.cluster.call_store(method, *args)

    def _replace_store(self, lost: StoreLost) -> None:
        """The new one goes on from the last outline. Raises ``lost`` if there can be none."""
        record = self._outline | {"published_version": self.published_version}
        if self.policy_version == record["policy_version"]:  # the batch that was in training has been trained
            ledger = record["ledger"]
            trained = {"trained": ledger["trained"] + record["in_training"]}
            record |= {"ledger": ledger | trained, "in_training": 0}
        if not self.cluster.replace_store(record):
            raise lost

    @_timed
    def update(self, batch_ref: Any) -> dict[str, float]:
        """Train on a super-batch; afterwards the policy version is one higher. Returns metrics.

        Raises RunError if several updates in a row were not finite.
        """
        self.view.status("training")
        updates = [learner.update.remote(batch_ref) for learner in self.cluster.learners]
        start, limit = time.monotonic(), self.cluster.deadlines.update_after(self._longest_update)
        metrics = self.cluster.get(updates, "the learner's update", limit)[0]
        self._longest_update = max(self._longest_update, time.monotonic() - start)
        self.policy_version += 1
        batch = self.cluster.get(batch_ref, "the super-batch", limit)
        self._guard.observe(metrics, batch)
        return metrics | describe(batch)

    @property
    def diverges(self) -> bool:
        """Whether the last update was not finite: the weights are those of before, and they may be about to diverge."""
        return self._guard.in_a_row > 0

    @_timed
    def publish(self, *, evaluates: bool = False) -> None:
        """Weight sync: inference acts with the newest version from now on; before an evaluation, with its average.

        ``evaluates``: whether ``evaluate`` comes next. It publishes the weights themselves at its end.
        """
        self._shows_average = evaluates and self.config.learner.ema is not None
        self.cluster.publish(self.policy_version, average=self._shows_average)
        self.published_version = self.policy_version

    @_timed
    def evaluate(self) -> dict[str, float]:
        """Evaluate what is published. No update happens meanwhile, so that one version plays all episodes.

        An evaluation that is asked to stop yields no metrics.
        """
        metrics: dict[str, float] = {}
        for evaluation in run_evaluations(
            self.cluster,
            self.spec,
            self.config.train.eval_episodes,
            self.config.seed,
            kinds=(True, False) if self.config.train.eval_sampled else (True,),
            record=3 if self.config.log.video else 0,
            status=self.view.status,
            stopped=lambda: self.stop.requested,
        ):
            kind = "greedy" if evaluation.greedy else "sampled"
            self.view.say(f"iteration {self.policy_version}: {evaluation.text()}")
            with self._attempt("the evaluation"):
                self.folder.save_evaluation(self.policy_version, evaluation)
            names = (f"eval/{kind}_success", f"eval/{kind}_low95", f"eval/{kind}_high95")
            metrics |= dict(zip(names, (evaluation.success, *evaluation.interval), strict=True))
            tasks = evaluation.per_task()
            if len(tasks) > 1:
                metrics |= {f"eval/{kind}_success_task_{row['task']}": row["success"] for row in tasks}
        if self._shows_average:
            with self.cluster.learner_on_device():
                self.publish()
        self.measure()  # leaves the evaluation out of the next iteration's rates
        return metrics

    def measure(self) -> dict[str, float]:
        """Rates and busy shares since the last measurement."""
        rates = self._throughput.measure(self.cluster.stats())
        for text in self.cluster.notes():
            self.view.say(f"iteration {self.policy_version}: an env worker: {text}")
        self._replanner.observe(self._throughput.growth)
        self._save_spans()
        return rates | self._of_world_model()

    def _save_spans(self) -> None:
        """What all processes have recorded, with ``log.trace``."""
        if self.meter.spans is None:
            return
        with self._attempt("the trace"):
            for process, lines in [("driver 0", self.meter.spans.take()), *self.cluster.spans()]:
                if lines:
                    self.folder.save_spans(process, lines)

    def _of_world_model(self) -> dict[str, float]:
        if self.cluster.world_model is None:
            return {}
        found = self.cluster.get(self.cluster.world_model.metrics.remote(), "the world model's metrics", 60.0)
        passed = bool(found.get("audit_passed"))
        if passed != self._imagines:
            self._imagines = passed
            measured = found.get("audit_chunks", 0.0) >= LEAST_CHUNKS
            basis = "its audit" if measured else "what is expected before its audit"
            what = f"passes {basis}: imagined chunks are trained on" if passed else f"fails {basis}: real data only"
            self.view.say(f"iteration {self.policy_version}: the world model {what}")
        return {f"world_model/{name}": value for name, value in found.items()}

    def log(self, metrics: dict[str, float]) -> None:
        """Write the metrics of an iteration, and show them."""
        counters = self.ask_store("counters")
        self._outline = self.ask_store("outline")
        played, succeeded = counters["played"] - self._outcomes[0], counters["succeeded"] - self._outcomes[1]
        self._outcomes = counters["played"], counters["succeeded"]
        if played:  # includes the episodes that GRPO filters out: what the policy can do
            metrics = metrics | {"rollout/success_played": succeeded / played}
        metrics = metrics | {f"episodes/{name}": float(value) for name, value in counters.items()}
        if pace := self.config.env.real_time:
            done = {"steps": counters["control_steps"], "chunks": counters["control_chunks"]}
            metrics["time/robot_hours"] = pace.robot_seconds(**done, episodes=counters["played"]) / 3600
        elapsed = self._elapsed()
        metrics |= {"time/seconds": elapsed, "restarts": float(self.cluster.restarts), "memory/gib": resident_gib()}
        metrics |= {"restarts_of_run": float(self.restarts), "memory/swap_gib": swapped_gib()}
        if self.config.placement.env_hosts.max:
            metrics["placement/env_hosts"] = float(self.cluster.env_hosts)
        if self.config.placement.replan_every:
            metrics["placement/migrations"] = float(self._replanner.migrations)
        metrics["machine/cpu"] = psutil.cpu_percent() / 100  # share of all cores since the previous iteration
        metrics["time/checkpoint_s"], self._saving_s = self._saving_s, 0.0
        if self.policy_version:
            metrics["time/left_s"] = self._time_left(elapsed)
        with self._attempt("the metrics"):
            self.folder.log(self.policy_version, metrics)
        self.view.update(self.policy_version, metrics)
        for callback in self.callbacks:
            if callback.on_iteration(self.policy_version, metrics):
                self.stop.requested = True

    @contextlib.contextmanager
    def _attempt(self, what: str) -> Iterator[None]:
        """Within the block, what is not vital: a full disk does not end a run, nor does a store that has died."""
        try:
            with self.cluster.asking_store():
                yield
        except (OSError, StoreLost) as error:
            self.view.say(f"iteration {self.policy_version}: {what} could not be written ({error}); the run goes on")

    def _elapsed(self) -> float:
        return self._earlier_s + time.monotonic() - self._started

    def _time_left(self, elapsed: float) -> float:
        train = self.config.train
        left = elapsed / self.policy_version * (train.iterations - self.policy_version)
        return left if train.max_minutes is None else min(left, max(0.0, 60 * train.max_minutes - elapsed))

    def propose_migration(self) -> Migration | None:
        """A better plan by the measured costs, if it is time to look for one (``placement.replan_every``)."""
        if self.stop.requested:
            return None
        try:
            migration = self._replanner.propose(self.policy_version, self.cluster.plan)
        except PlanError as error:
            self.view.say(f"iteration {self.policy_version}: the plan stays; by the measured costs, {error}")
            return None
        if migration is not None:
            self.view.say(f"iteration {self.policy_version}: {migration.text()}")
            with self._attempt("the migration"):
                self.folder.log_migration(self.policy_version, migration.record())
        return migration

    def drain(self) -> None:
        """Let all running episodes end, so that the checkpoint that follows loses none."""
        self.ask_store("close")
        deadline = time.monotonic() + STALL_S
        while (running := self.ask_store("counters")["running"]) and time.monotonic() < deadline:
            if self.stop.requested:
                return
            self.view.status(f"migrating: waiting for {running} episodes to end")
            time.sleep(_DRAIN_POLL_S)

    @_timed
    def checkpoint(self, plan: Plan) -> None:
        """Begin a checkpoint of this moment, which is written while training goes on; see ``settle``.

        ``plan``: the one with which to continue.
        """
        self.settle(wait=True)
        self.view.status("copying for a checkpoint")
        start = time.monotonic()
        about = {"run": self.folder.path.name, "iteration": self.policy_version}
        with self._attempt("a checkpoint"):
            self._saving = Saving.begin(
                self.cluster,
                self.folder,
                self.policy_version,
                about=about | metadata(self.config, self.spec, sys.argv),
                state={
                    "policy_version": self.policy_version,
                    "seconds": self._elapsed(),
                    "replanner": self._replanner.state(),
                    "layout": layout_record(plan),
                },
            )
        self._saving_s += time.monotonic() - start
        if (profile := self._replanner.profile()) is not None:
            with self._attempt("the profile"):
                self.folder.save_profile(profile)

    def settle(self, *, wait: bool = False) -> None:
        """Complete the checkpoint that is being written, if it is, or after waiting for that."""
        if self._saving is None or not (wait or self._saving.is_written()):
            return
        if wait:
            self.view.status("completing a checkpoint")
        start, saving, self._saving = time.monotonic(), self._saving, None
        with self._attempt("a checkpoint"):
            saving.complete()
            for callback in self.callbacks:
                callback.on_checkpoint(self.folder.checkpoints.of(saving.iteration))
        self._saving_s += time.monotonic() - start

    def is_saved(self) -> bool:
        """Whether there is a checkpoint of this iteration."""
        complete = self.folder.checkpoints.complete()
        return bool(complete) and complete[-1].name == f"{self.policy_version:06d}"

    def finish(self) -> None:
        """The last checkpoint, if it is missing, the curves, what looks wrong, and a word about what comes next."""
        from vla_rl.observability.plots import draw_curves

        self.settle(wait=True)
        if not self.is_saved():
            self.checkpoint(self.cluster.plan)
            self.settle(wait=True)
        if not self.is_saved():
            raise RunError(
                f"the last checkpoint, of iteration {self.policy_version}, could not be written to {self.folder.path}; "
                f"make room, then continue from the one before: vla-rl train --resume {self.folder.path}"
            )
        self._save_spans()
        with guarded("curves.png"):
            draw_curves(self.folder.metrics(), self.folder.path / "curves.png", self.folder.path.name)
        if self.has_converged():
            self.view.say(f"stopped early: the highest success was reached at iteration {self.folder.best_iteration()}")
        elif self.policy_version < self.config.train.iterations:
            self.view.say(
                f"stopped after {self.policy_version} of {self.config.train.iterations} iterations; "
                f"continue with: vla-rl train --resume {self.folder.path}"
            )
        done = self.has_converged() or self.policy_version >= self.config.train.iterations
        self.view.status("complete" if done else "stopped")
        if not self.folder.temporary:
            with guarded("vla-rl why"):
                for text in last_words(self.folder.path) if self.policy_version else ():
                    self.view.say(text)
            self.view.say(f"results: {self.folder.path} (curves.png, evaluations/, checkpoints/)")
