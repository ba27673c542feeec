"""`vla-rl train`: a training run, with its main loop.

    while the run is not over:
        next_batch   the store has filled and collated it while the previous batch was trained
        update       the learner trains; env workers and inference servers fill the next batch meanwhile
        publish      weight sync, if due: servers copy the new version between two inference batches
        advance      the store's admission gate opens further
        evaluate, log, migrate to a better plan, checkpoint: if due

A migration is a resume in the same process: the checkpoint names the next plan, and the run continues from it. So is
the restart after a failure (``recovery``).
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from vla_rl.cluster.cluster import Cluster
from vla_rl.cluster.held_folder import sweep_leftovers
from vla_rl.cluster.ray_session import require_cluster
from vla_rl.commands.dataset import complete_dataset
from vla_rl.commands.fitting import require_fit
from vla_rl.commands.metadata import knows_conditions, with_ranges_of
from vla_rl.commands.recovery import Recovery, Start
from vla_rl.commands.report import report_at_end
from vla_rl.commands.run_folder import RunFolder
from vla_rl.commands.signals import StopRequest
from vla_rl.commands.trainer import Trainer
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RecoverableError, RunError, UserError
from vla_rl.core.files import write_json
from vla_rl.core.records import EnvSpec
from vla_rl.observability.callbacks import Callback, TrainResult
from vla_rl.observability.console import TrainingView
from vla_rl.observability.heartbeat import announcing
from vla_rl.observability.prometheus import MetricsPage
from vla_rl.placement.plan import Plan
from vla_rl.placement.planner import plan_run
from vla_rl.placement.shared_memory import SharedMemoryNeeds
from vla_rl.replay.rules import StoreRules

_NEW_CONDITIONS = (
    "policy.checkpoint={checkpoint}: nothing says that it knows what algo={algo} adds to its instructions; a policy "
    "that does not know it fails under it. Make a warm start that does: vla-rl sft CONFIG algo={algo}"
)


def train(
    config: RunConfig, resume: Path | None = None, json_file: Path | None = None, iteration: int | None = None
) -> int:
    """`vla-rl train`: ``run_training``, and the metrics of the last iteration in ``json_file``. The exit status."""
    result = run_training(config, resume, iteration)
    if json_file is not None:
        write_json(json_file, {"run": str(result.run), "metrics": result.metrics[-1] if result.metrics else {}})
    return 0


def run_training(
    config: RunConfig,
    resume: Path | None = None,
    iteration: int | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    temporary: bool = False,
) -> TrainResult:
    """Run a training, or continue the run in the folder ``resume``; one that is complete stays as it is.

    ``iteration``: of the checkpoint to continue from; None: the newest. ``temporary``: its folder will be removed, and
    is not named. Other runs get a report, however they end. Raises UserError before any process is started, where the
    mistake can be found that early.
    """
    from envs import env_spec
    from vla_rl.policies.build import check_policy, require_trainable

    require_trainable(config.policy)
    with announcing("checking simulator, policy and plan"):
        spec = env_spec(config.env)
        check_policy(config.policy, spec)
        config.algo.check_simulator(spec)
        require_cluster(config.placement.ray_address)
        sweep_leftovers()  # of dead runs, before free memory is asked for
        plan = plan_run(config, spec)
        SharedMemoryNeeds.of(config, spec, plan).check()
        folder, checkpoint = (
            RunFolder.reopen(resume, config, iteration) if resume else (RunFolder.create(config, spec, sys.argv), None)
        )
    folder.temporary = temporary
    spec = with_ranges_of(folder.path, spec)
    with ExitStack() as afterwards, closing(folder), ExitStack() as stack:
        start = Start.of(checkpoint, config) if checkpoint else Start()
        if checkpoint:
            require_fit(config, folder.path, checkpoint, spec)
            if start.state["policy_version"] >= config.train.iterations:
                print(f"{folder.path} is complete: {config.train.iterations} iterations; train.iterations=N goes on")
                return folder.result()
        if (port := config.log.prometheus_port) is not None:
            callbacks = [*callbacks, stack.enter_context(MetricsPage(port))]
        stack.enter_context(complete_dataset(config, spec))
        for callback in callbacks:
            callback.on_start(folder.path)
        afterwards.callback(report_at_end, folder)
        _run(config, spec, folder, plan, start, callbacks)
    result = folder.result()
    for callback in callbacks:
        callback.on_end(result)
    return result


def _run(
    config: RunConfig, spec: EnvSpec, folder: RunFolder, plan: Plan, start: Start, callbacks: Sequence[Callback]
) -> None:
    """Train on one cluster after the other, as often as the run migrates or is restarted."""
    done = start.state["policy_version"]
    title = f"{config.algo.name.upper()} on {spec.name}, {config.mode}"
    title += ", to measure it" if folder.temporary else f": {folder.path}"
    with StopRequest() as stop, TrainingView(title, spec, config.train.iterations, done, folder.metrics()) as view:
        if not knows_conditions(config.policy.checkpoint, config.algo.conditions):
            view.say(_NEW_CONDITIONS.format(checkpoint=config.policy.checkpoint, algo=config.algo.name))
        recovery = Recovery(config, folder, start.state["seconds"], view.say)

        def recover(error: Exception) -> Start:
            stop.graceful = False  # nothing is done meanwhile that a checkpoint would save
            if stop.requested:
                raise error
            return recovery.start_after(error)

        def new_trainer(cluster: Cluster) -> Trainer:
            trainer = Trainer(config, spec, folder, cluster, view, stop, callbacks)
            trainer.restarts = recovery.restarts
            return trainer

        unfinished = True
        while unfinished:
            try:
                view.status("starting: Ray")
                with Cluster(config, start.plan or plan, spec, StoreRules.of(config, spec)) as cluster:
                    unfinished = _run_on(cluster, start, new_trainer, recover)
                if unfinished:
                    start = Start.of(folder.checkpoints.newest(), config)
            except (RunError, UserError, OSError) as error:
                start = recover(error)


def _run_on(
    cluster: Cluster, start: Start, new_trainer: Callable[[Cluster], Trainer], recover: Callable[[Exception], Start]
) -> bool:
    """``main_loop``, started again after failures as long as there are updates in between; it keeps what is loaded."""
    while True:
        trainer = new_trainer(cluster)
        begun = start.state["policy_version"]
        try:
            trainer.start(start.checkpoint, start.state, start.trajectories)
            start.trajectories.clear()  # the store has them
            return main_loop(trainer)
        except RecoverableError as error:
            if trainer.policy_version <= begun or not cluster.retire():
                raise
            start = recover(error)


# consumes: super-batches. waits for: the store, the learners. unblocked by: their answers, time limits, Ctrl-C.
def main_loop(t: Trainer) -> bool:
    """Train until the run is over (False), or until another plan is better (True: resume from the checkpoint)."""
    train = t.config.train
    if t.policy_version == 0 and train.eval_episodes and train.eval_start:
        t.log(t.evaluate())
    last = t.is_last()
    while not last and not t.stop.requested:
        batch = t.next_batch()
        if batch is None:  # Ctrl-C
            break
        with t.cluster.learner_on_device():
            metrics = t.update(batch)
            del batch  # so that Ray frees it
            last = t.is_last()
            evaluates = train.eval_episodes > 0 and (last or t.due(train.eval_every))
            if last or t.due(t.config.publish_every) or t.due(train.eval_every):
                t.publish(evaluates=evaluates)
            t.ask_store("advance", t.published_version)
        metrics |= t.measure()
        if evaluates:
            metrics |= t.evaluate()
        t.log(metrics)
        t.settle()
        last = last or t.has_converged()
        if not last and (migration := t.propose_migration()):
            t.drain()
            t.checkpoint(migration.plan)
            t.settle(wait=True)
            if t.is_saved() and not t.stop.requested:
                return True
            t.ask_store("open")
        elif last or t.stop.requested or (not t.diverges and (t.due(train.checkpoint_every) or t.improved())):
            t.checkpoint(t.cluster.plan)
    t.finish()
    return False
