"""What a run writes.

runs/NAME/
    config.yaml      the resolved configuration
    metadata.json    versions, git commit, machine, assets
    metrics.jsonl    one line per iteration; null where a number is not finite
    tensorboard/     the same for TensorBoard; wandb/, with log.wandb, for Weights & Biases
    wandb_id         by which a resumed run continues there
    checkpoints/     see ``checkpoints``
    profile.yaml     the costs that the run has measured; written with every checkpoint
    migrations.jsonl one line per migration to a better plan (placement.replan_every)
    not_finite/      see ``divergence``
    evaluations/     a JSON file per evaluation, and a video
    trace/           with log.trace, what each process did when: see ``observability.spans``
    curves.png       drawn at the end
    report.html      written at the end, see ``report``
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vla_rl.commands.checkpoints import Checkpoints, read_state
from vla_rl.commands.loggers import Logger, guarded, open_loggers
from vla_rl.commands.metadata import metadata
from vla_rl.config.loading import dump_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import new_folder, remove_partial, replacing, write_json
from vla_rl.core.records import EnvSpec
from vla_rl.observability.callbacks import TrainResult
from vla_rl.observability.films import write_film
from vla_rl.observability.metrics_file import read_records
from vla_rl.observability.success_rate import Evaluation
from vla_rl.placement.profile import Profile, save_profile


class RunFolder:
    """One run's folder and its loggers."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config
        self.checkpoints = Checkpoints(path / "checkpoints", config.train.keep_checkpoints)
        self._evaluations = [found for record in self.metrics() if (found := _evaluation(record))]
        self._unwritten: list[str] = []  # records for which the disk had no room
        self.updates = 0  # logged by this process
        self.temporary = False  # removed after the run: nobody is told its path
        self._lock: FileLock | None = None
        self._is_new = False
        self._continues: tuple[Path | None] | None = None  # the checkpoint from which ``begin`` will go on
        self._loggers: list[Logger] = []

    @classmethod
    def create(cls, config: RunConfig, spec: EnvSpec, argv: Sequence[str]) -> Self:
        """Create the folder, and write what is known at the start. Raises UserError if that is not possible."""
        parent, name = Path(config.log.dir), config.log.name
        run: Self | None = None
        try:
            if name is None:
                started = time.strftime("%Y%m%d-%H%M%S")
                parts = (name.rpartition(":")[2] for name in (config.algo.name, config.env.name))  # of module:Class
                path = new_folder(parent, f"{'-'.join(parts)}-{started}")
            else:
                path = parent / name
                path.mkdir(parents=True, exist_ok=_is_stillborn(path))
            run = cls(path, config)
            run._take_lock()
            run._is_new = True  # only now: the folder is nobody else's, and may be removed
            write_json(path / "metadata.json", metadata(config, spec, argv))
            with replacing(path / "config.yaml") as partial:  # the last: with it, the run can be resumed
                partial.write_text(dump_config(config))
            run._loggers = open_loggers(path, config, None)
            return run
        except BaseException as error:
            if run is not None:
                run.close()
            elif isinstance(error, FileExistsError) and path.is_dir():
                raise UserError(
                    f"log.name={name!r}: {path} exists; continue that run with --resume {path}, or choose another name"
                ) from None
            if isinstance(error, (OSError, ValueError)) and not isinstance(error, UserError):
                raise UserError(f"log.dir={parent}: no run folder can be written there ({error})") from None
            raise

    @classmethod
    def reopen(cls, path: Path, config: RunConfig, iteration: int | None = None) -> tuple[Self, Path | None]:
        """The run, and its checkpoint of an iteration or the newest (None: there is none yet).

        Nothing is written before ``begin``: a request that turns out to be impossible leaves the run as it was.

        Damaged checkpoints do not count as the newest. Raises UserError if there is no checkpoint of ``iteration``, or
        another process continues the run.
        """
        run = cls(path, config)
        run._take_lock()
        try:
            if iteration is None:
                checkpoint = run._newest(print)
            else:
                read_state(checkpoint := run.checkpoints.of(iteration))
        except BaseException:
            run.close()
            raise
        run._continues = (checkpoint,)
        return run, checkpoint

    def begin(self) -> None:
        """A reopened run goes on now, with its new config: its processes have started from the checkpoint.

        Later metrics are removed, later checkpoints set aside.
        """
        if self._continues is None:
            return
        (checkpoint,), self._continues = self._continues, None
        self._rewind(int(checkpoint.name) if checkpoint else -1)  # first: if killed here, the run is as it was then
        with replacing(self.path / "config.yaml") as partial:
            partial.write_text(dump_config(self.config))
        self._loggers = open_loggers(self.path, self.config, int(checkpoint.name) if checkpoint else 0)

    @property
    def has_begun(self) -> bool:
        """Whether this process may write: a new run, or a reopened one after ``begin``."""
        return self._continues is None

    def _newest(self, say: Callable[[str], None]) -> Path | None:
        return self.checkpoints.newest_undamaged(say) if self.checkpoints.complete() else None

    def _take_lock(self) -> None:
        path = self.path / "lock"
        self._lock = FileLock.acquire(path)
        if self._lock is None:
            raise UserError(f"{self.path} is in use by {path.read_text()}; wait for its end, or stop it")

    def _rewind(self, iteration: int) -> None:
        remove_partial(self.path)
        self.checkpoints.set_aside_after(iteration)  # first: if killed here, no checkpoint is without its metrics
        kept = [json.dumps(record) + "\n" for record in self.metrics() if record["iteration"] <= iteration]
        with replacing(self._metrics_file) as partial:
            partial.write_text("".join(kept))
        self._evaluations = [found for found in self._evaluations if found[0] <= iteration]

    def go_back(self, say: Callable[[str], None]) -> Path | None:
        """Continue from the newest undamaged checkpoint, in the same process; None: from the beginning.

        Raises UserError if there are checkpoints, and all are damaged.
        """
        if self._continues is not None:  # it has not begun
            return self._continues[0]
        checkpoint = self._newest(say)
        iteration = int(checkpoint.name) if checkpoint else -1
        self._unwritten.clear()
        self._rewind(iteration)
        for logger in self._loggers:
            with guarded(_name(logger)):
                logger.rewind(iteration)
        return checkpoint

    @property
    def _metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def metrics(self) -> list[dict[str, float]]:
        """All records, without a last line that a crash has cut off."""
        if not self._metrics_file.exists():
            return []
        return read_records(self._metrics_file)

    def best_iteration(self) -> int | None:
        """The iteration with the highest greedy success, the last of them; None before the first evaluation."""
        newest_first = reversed(self._evaluations)
        return max(newest_first, key=lambda pair: pair[1])[0] if self._evaluations else None

    def best_checkpoint(self) -> Path:
        """The checkpoint of ``best_iteration``. Raises UserError if there is none."""
        best = self.best_iteration()
        if best is None:
            raise UserError(f"{self.path}: the run has no evaluation by which to choose; leave out --best")
        return self.checkpoints.of(best)

    def result(self) -> TrainResult:
        """What the run has left. Raises UserError if it has no checkpoint."""
        newest, best = self.checkpoints.newest(), self.best_iteration()
        kept = {int(folder.name): folder / "policy" for folder in self.checkpoints.complete()}
        best_checkpoint = None if best is None else kept.get(best)
        return TrainResult(self.path, self.metrics(), newest / "policy", best_checkpoint, int(newest.name))

    def evaluations_since_best(self) -> int:
        """How many evaluations have been made since ``best_iteration`` without reaching its success."""
        best = self.best_iteration() or 0
        return sum(iteration > best for iteration, _ in self._evaluations)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an iteration to all loggers. ``iteration``: updates done.

        Raises OSError if the disk has no room; the record is then written with a later one.
        """
        record = {"iteration": iteration, "time": time.time()} | {k: _rounded(v) for k, v in metrics.items()}
        self.updates += iteration > 0
        self._unwritten.append(json.dumps(record) + "\n")
        if found := _evaluation({"iteration": iteration} | dict(metrics)):
            self._evaluations.append(found)
        try:
            self._append_metrics()
        finally:
            for logger in self._loggers:
                with guarded(_name(logger)):
                    logger.log(iteration, metrics)

    def _append_metrics(self) -> None:
        """Whole lines, or none; what does not fit now is written later."""
        before = self._metrics_file.stat().st_size if self._metrics_file.exists() else 0
        try:
            with self._metrics_file.open("ab") as file:
                file.write("".join(self._unwritten).encode())
        except OSError:
            os.truncate(self._metrics_file, before)
            raise
        self._unwritten.clear()

    def save_profile(self, profile: Profile) -> None:
        save_profile(profile, self.path / "profile.yaml")

    def log_migration(self, iteration: int, migration: Mapping[str, Any]) -> None:
        with (self.path / "migrations.jsonl").open("a") as file:
            file.write(json.dumps({"iteration": iteration, "time": time.time()} | dict(migration)) + "\n")

    def save_spans(self, process: str, lines: bytes) -> None:
        """Append to the process's file. What a full disk cuts off does not harm what comes later (``read_trace``)."""
        path = self.path / "trace" / f"{process.replace(' ', '-')}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)

    def save_evaluation(self, iteration: int, evaluation: Evaluation) -> None:
        """evaluations/ITERATION-KIND.json and, of the filmed episodes, .mp4; loggers get both. KIND: "greedy" or
        "sampled"."""
        kind = "greedy" if evaluation.greedy else "sampled"
        name = self.path / "evaluations" / f"{iteration:06d}-{kind}"
        record = evaluation.record()
        write_json(name.with_suffix(".json"), record)
        film = name.with_suffix(".mp4")
        if evaluation.filmed:
            with guarded(f"the film {film}"):
                write_film(film, evaluation.filmed, evaluation.spec)
        shown = [frame for episode in evaluation.frames for frame in episode]
        for logger in self._loggers:
            with guarded(_name(logger)):
                logger.log_evaluation(iteration, kind, record["tasks"], film if film.is_file() else None, shown)

    def close(self) -> None:
        """A new run that has logged nothing, and cannot be continued, leaves no folder."""
        for logger in self._loggers:
            with guarded(_name(logger)):
                logger.close()
        self._loggers = []
        if self._is_new and not self._metrics_file.exists() and not self.checkpoints.complete():
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def _is_stillborn(path: Path) -> bool:
    """Whether the folder is that of a run that was killed before it could be resumed, and holds nothing else."""
    files = {file.name for file in path.iterdir() if file.suffix != ".partial"} if path.is_dir() else set()
    return "lock" in files and files <= {"lock", "metadata.json"}


def _name(logger: Logger) -> str:
    return type(logger).__name__.removesuffix("Logger")


def _evaluation(record: Mapping[str, float]) -> tuple[int, float] | None:
    """Iteration and greedy success, if the record of an iteration holds an evaluation."""
    success = record.get("eval/greedy_success")
    return None if success is None else (int(record["iteration"]), success)


def _rounded(value: float) -> float | None:
    """None, which JSON has, in place of NaN and infinity, which it lacks."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
