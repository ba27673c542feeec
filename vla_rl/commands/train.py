"""A training run: the macro flow, in one screen.

while there are iterations left:
    batch   = store.next_batch()          filled and collated while the batch before was trained
    metrics = learners.update(batch)      meanwhile workers and servers fill the next
    learners.publish(version)             servers swap between two inference batches; when due
    store.advance(version)                the admission gate opens
    evaluate, checkpoint, log             when due

What resumes a run also moves it to another plan: a checkpoint says what the next one is, and ``train`` goes on from it.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vla_rl.cluster.cluster import Cluster
from vla_rl.commands.checkpoints import read_state
from vla_rl.commands.evaluate import STALL_S, run_evaluation
from vla_rl.commands.run_folder import RunFolder, metadata
from vla_rl.commands.signals import StopRequest
from vla_rl.config.run_config import RunConfig
from vla_rl.core.records import EnvSpec, SuperBatch
from vla_rl.observability.console import TrainingView
from vla_rl.observability.usage import Throughput, resident_gib
from vla_rl.placement.measured_profile import Costs, Measured
from vla_rl.placement.plan import Plan, PlanError
from vla_rl.placement.planner import layout_record, plan_of_record, plan_run
from vla_rl.placement.replan import Move, look
from vla_rl.replay.store import StoreRules
from vla_rl.replay.super_batch import describe
from vla_rl.replay.trajectory_file import load_trajectories

_UPDATE_TIMEOUT_S = 3600.0
_CHECKPOINT_TIMEOUT_S = 600.0
_DRAIN_POLL_S = 0.2


def train(config: RunConfig, resume: Path | None = None, json_file: Path | None = None) -> int:
    """Run or continue a training; returns the exit status. Raises UserError before anything is started where it can.

    ``json_file``: where the last iteration's figures are written as well.
    """
    from envs import env_spec
    from vla_rl.policies import check_policy

    spec = env_spec(config.env)
    check_policy(config.policy, spec)
    checkpoint = RunFolder(resume, config).checkpoints.newest() if resume else None
    state: dict[str, Any] = read_state(checkpoint) if checkpoint else {"iteration": 0, "seconds": 0.0}
    run = RunFolder.reopen(resume, config, state["iteration"]) if resume else RunFolder.create(config, spec, sys.argv)
    rules = StoreRules(
        batch_episodes=config.train.batch_episodes,
        max_age=0 if config.mode == "sync" else config.train.max_age,
        num_tasks=len(spec.instructions),
        seed=config.seed,
        iterations=config.train.iterations,
        groups=config.algo.groups,
        task_rule=config.train.task_sampling,
        init_states=spec.init_states if config.train.start_states == "benchmark" else None,
    )
    title = f"{config.algo.name.upper()} on {spec.name}, {config.mode}: {run.path}"
    with (
        closing(run),
        StopRequest() as stop,
        TrainingView(title, spec, config.train.iterations, state["iteration"]) as view,
    ):
        while True:
            with Cluster(config, _plan(config, spec, state), spec, rules) as cluster:
                trainer = Trainer(config, spec, run, cluster, view, stop, **_progress(state))
                if not trainer.run(checkpoint):
                    break
            checkpoint = run.checkpoints.newest()
            state = read_state(checkpoint)
    if json_file is not None:
        json_file.write_text(json.dumps({"run": str(run.path), "metrics": run.metrics()[-1]}, indent=2) + "\n")
    return 0


def _plan(config: RunConfig, spec: EnvSpec, state: dict[str, Any]) -> Plan:
    """As configured; a run that plans anew goes on as its checkpoint says, where the machine still allows that."""
    plan = plan_of_record(config, state["layout"]) if config.placement.replan_every and "layout" in state else None
    return plan or plan_run(config, spec)


def _progress(state: dict[str, Any]) -> dict[str, Any]:
    """Of a checkpoint's state, what a trainer goes on with."""
    return {
        "iteration": state["iteration"],
        "seconds": state["seconds"],
        "moves": state.get("moves", 0),  # absent in a checkpoint of an earlier release, as is the next
        "costs": Costs(state.get("costs", {})),
    }


@dataclass(slots=True)
class Trainer:
    """The outer loop over a started cluster."""

    config: RunConfig
    spec: EnvSpec
    run_folder: RunFolder
    cluster: Cluster
    view: TrainingView
    stop: StopRequest
    iteration: int  # updates done; also the learner's policy version
    seconds: float  # spent in earlier sessions of this run
    moves: int  # to other plans
    costs: Costs
    started: float = field(default_factory=time.monotonic)
    _throughput: Throughput = field(default_factory=Throughput)
    _measured: Measured = field(init=False)
    _published: int = 0  # newest version that inference acts with
    _outcomes: tuple[int, int] = (0, 0)  # training episodes played and succeeded, at the last iteration

    # consumes: super-batches. waits for: the store, the learners. unblocked by: their answers, time limits, Ctrl-C.
    def run(self, checkpoint: Path | None) -> bool:
        """Train until the end, or (True) until another plan is better: the checkpoint written then is to be resumed."""
        train = self.config.train
        self._start(checkpoint)
        if self.iteration == 0 and train.eval_episodes and train.eval_start:
            self._log(self._evaluate())
        last = self._is_last()
        while not last and not self.stop.requested:
            batch_ref, batch = self._next_batch()
            if batch is None:
                break
            with self.cluster.room_for_learner():
                metrics = self._update(batch_ref) | describe(batch)
                self.iteration += 1
                last = self._is_last()
                self._publish(last)
            metrics |= self._measure()
            if train.eval_episodes and (last or self._due(train.eval_every)):
                metrics |= self._evaluate()
            self._log(metrics)
            move = None if last or self.stop.requested else self._look_for_a_move()
            if move is not None:
                self._prepare(move)
            if move or last or self._due(train.checkpoint_every) or self.stop.requested:
                self._checkpoint(move.plan if move else self.cluster.plan)
            if move is not None and not self.stop.requested:
                return True
        self._finish()
        return False

    def _start(self, checkpoint: Path | None) -> None:
        self.view.status("starting processes")
        self.cluster.start(checkpoint / "learner" if checkpoint else None, self.iteration)
        self._published = self.iteration
        self.stop.listen()
        name, memory = self.run_folder.path.name, self.cluster.policy_memory()
        self._measured = Measured.of(name, self.config, self.spec, memory)
        if checkpoint:
            record = read_state(checkpoint)["store"]
            self.cluster.call_store("restore", record, load_trajectories(checkpoint / "trajectories.npz"))
        self.cluster.open_for_work()

    def _is_last(self) -> bool:
        """Whether no iteration follows: all are done, or the time is up, but not before the first."""
        train = self.config.train
        in_time = train.max_minutes is None or self._elapsed() <= 60 * train.max_minutes
        return self.iteration >= train.iterations or (self.iteration > 0 and not in_time)

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    def _due(self, every: int) -> bool:
        return every > 0 and self.iteration % every == 0

    def _next_batch(self) -> tuple[Any, SuperBatch | None]:
        """The next super-batch as (reference, value); (None, None) where the run is asked to stop meanwhile."""
        patience = time.monotonic() + STALL_S
        ended = -1
        while not self.stop.requested:
            ref: Any = self.cluster.store.next_batch.remote(2.0)
            batch = self.cluster.get(ref, "the next super-batch", 120.0)
            if batch is not None:
                return ref, batch
            counters = self.cluster.call_store("counters")
            self.view.status(
                f"filling the next super-batch: {counters['buffered']} of {self.config.train.batch_episodes} episodes, "
                f"{counters['running']} running"
            )
            if counters["started"] + counters["buffered"] != ended:
                ended, patience = counters["started"] + counters["buffered"], time.monotonic() + STALL_S
            if time.monotonic() > patience:
                raise TimeoutError(f"no episode finished for {STALL_S:.0f} s; the store's counters: {counters}")
        return None, None

    def _update(self, batch_ref: Any) -> dict[str, float]:
        self.view.status("training")
        updates = [learner.update.remote(batch_ref, self.iteration) for learner in self.cluster.learners]
        return self.cluster.get(updates, "the learner's update", _UPDATE_TIMEOUT_S)[0]

    def _publish(self, last: bool) -> None:
        """Hand the weights over where it is time to, or where an evaluation follows."""
        every = 1 if self.config.mode == "sync" else self.config.train.publish_every
        if last or self._due(every) or self._due(self.config.train.eval_every):
            self.cluster.publish(self.iteration)
            self._published = self.iteration
        else:
            self.cluster.release()
        self.cluster.call_store("advance", self._published)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the newest version. No update happens meanwhile, so that one version plays all episodes."""
        metrics: dict[str, float] = {}
        for greedy in (True, False) if self.config.train.eval_sampled else (True,):
            kind = "greedy" if greedy else "sampled"
            evaluation = run_evaluation(
                self.cluster,
                self.spec,
                self.config.train.eval_episodes,
                self.config.seed,
                greedy=greedy,
                record=3 if greedy and self.config.log.video else 0,
                status=self.view.status,
            )
            self.view.say(f"iteration {self.iteration}: {evaluation.text()}")
            name = f"{self.iteration:06d}-{kind}"
            self.run_folder.save_evaluation(name, evaluation.record(), evaluation.frames)
            low, high = evaluation.interval
            metrics |= {
                f"eval/{kind}_success": evaluation.success,
                f"eval/{kind}_low95": low,
                f"eval/{kind}_high95": high,
            }
        self._measure()  # the next iteration's rates leave the evaluation out
        return metrics

    def _measure(self) -> dict[str, float]:
        """Rates since the last measurement; what it cost is added up."""
        rates = self._throughput.measure(self.cluster.stats())
        self.costs.add(self._throughput.growth)
        return rates

    def _look_for_a_move(self) -> Move | None:
        """A better plan, by what was measured since the last look, where it is time for one."""
        if not self._due(self.config.placement.replan_every):
            return None
        self.view.status("planning anew")
        try:
            return look(self.costs, self._measured, self.config, self.spec, self.cluster.plan)
        except PlanError as error:
            self.view.say(f"iteration {self.iteration}: the plan stays as it is; by the costs measured, {error}")
            return None

    def _prepare(self, move: Move) -> None:
        """Let all episodes under way come to their end, so that the checkpoint that follows loses none."""
        self.moves += 1
        self.view.say(f"iteration {self.iteration}: {move.text()}")
        self.run_folder.log_move(self.iteration, move.record())
        self.cluster.call_store("close")
        patience = time.monotonic() + STALL_S
        while (running := self.cluster.call_store("counters")["running"]) and time.monotonic() < patience:
            if self.stop.requested:
                return
            self.view.status(f"moving: {running} episodes come to their end")
            time.sleep(_DRAIN_POLL_S)

    def _log(self, metrics: dict[str, float]) -> None:
        counters = self.cluster.call_store("counters")
        played, succeeded = counters["played"] - self._outcomes[0], counters["succeeded"] - self._outcomes[1]
        self._outcomes = counters["played"], counters["succeeded"]
        if played:  # also what GRPO filters out, so that one can see what the policy is able to do
            metrics = metrics | {"rollout/success_played": succeeded / played}
        metrics = metrics | {f"episodes/{name}": float(value) for name, value in counters.items()}
        elapsed = self._elapsed()
        metrics |= {"time/seconds": elapsed, "restarts": float(self.cluster.restarts), "memory/gib": resident_gib()}
        if self.config.placement.replan_every:
            metrics["placement/moves"] = float(self.moves)
        metrics["machine/cpu"] = psutil.cpu_percent() / 100  # of all cores, since the last iteration
        if self.iteration:
            metrics["time/left_s"] = self._time_left(elapsed)
        self.run_folder.log(self.iteration, metrics)
        self.view.update(self.iteration, metrics)

    def _time_left(self, elapsed: float) -> float:
        train = self.config.train
        left = elapsed / self.iteration * (train.iterations - self.iteration)
        return left if train.max_minutes is None else min(left, max(0.0, 60 * train.max_minutes - elapsed))

    def _checkpoint(self, plan: Plan) -> None:
        """``plan``: by which to go on from it."""
        self.view.status("writing a checkpoint")
        with self.run_folder.checkpoints.write(self.iteration) as folder:
            about = {"run": self.run_folder.path.name, "iteration": self.iteration} | metadata(self.spec, sys.argv)
            with self.cluster.room_for_learner():
                saves = [learner.save.remote(folder, about) for learner in self.cluster.learners]
                record = self.cluster.get(
                    self.cluster.store.save.remote(folder), "the store's state", _CHECKPOINT_TIMEOUT_S
                )
                self.cluster.get(saves, "the learner's checkpoint", _CHECKPOINT_TIMEOUT_S)
            state = {"iteration": self.iteration, "seconds": self._elapsed(), "store": record}
            state |= {"moves": self.moves, "costs": self.costs.run, "layout": layout_record(plan)}
            (folder / "state.json").write_text(json.dumps(state, indent=2))
        if self.costs.complete:
            self.run_folder.save_profile(self._measured.profile(self.costs.run))

    def _finish(self) -> None:
        complete = self.run_folder.checkpoints.complete()
        if not complete or complete[-1].name != f"{self.iteration:06d}":
            self._checkpoint(self.cluster.plan)
        from vla_rl.observability.plots import draw_curves

        draw_curves(self.run_folder.metrics(), self.run_folder.path / "curves.png", self.run_folder.path.name)
        if self.iteration < self.config.train.iterations:
            self.view.say(
                f"stopped after {self.iteration} of {self.config.train.iterations} iterations; "
                f"continue with: vla-rl train --resume {self.run_folder.path}"
            )
        self.view.say(f"results: {self.run_folder.path} (curves.png, evaluations/, checkpoints/)")
