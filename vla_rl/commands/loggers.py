"""TensorBoard and Weights & Biases: both get the metrics of ``metrics.jsonl`` under the same names, and of each
evaluation a table of its tasks (``eval/KIND_tasks``) and a film (``eval/KIND_video``). TensorBoard also gets a page of
charts and the run's hyperparameters. docs/metrics.md explains them.
"""

import io
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from vla_rl.config.run_config import RunConfig

_COLUMNS = ("task", "instruction", "episodes", "successes", "success", "success_low95", "success_high95")
_KEPT_EVENTS = 1000  # for which the disk had no room
_WANDB_START_S, _WANDB_END_S = 20.0, 60.0  # for an answer of W&B, and for what is not uploaded yet
_GIF_FRAMES, _GIF_SIZE = 60, 128  # TensorBoard shows no videos: a shorter and smaller animation
# TensorBoard's page of charts. "Margin": a value with the limits of its interval; "Multiline": by regular expressions.
_CHARTS: dict[str, dict[str, tuple[str, list[str]]]] = {
    "success": {
        "greedy, 95 %": ("Margin", ["eval/greedy_success", "eval/greedy_low95", "eval/greedy_high95"]),
        "sampled, 95 %": ("Margin", ["eval/sampled_success", "eval/sampled_low95", "eval/sampled_high95"]),
        "rollouts": ("Multiline", ["rollout/success$", "rollout/success_played$"]),
    },
    "learner": {
        "change of the policy": ("Multiline", ["learner/update_kl$", "learner/approx_kl$", "learner/reference_kl$"]),
        "ratios": ("Multiline", ["learner/clip_fraction$", "learner/ess$"]),
        "entropy": ("Multiline", ["learner/entropy$"]),
        "explained variance": ("Multiline", ["learner/explained_variance$"]),
    },
    "throughput": {
        "control steps a second": ("Multiline", ["throughput/env_steps_per_s$"]),
        "seconds of an iteration": ("Multiline", ["time/iteration_s$"]),
        "busy": ("Multiline", ["busy/env_workers$", "busy/inference$", "busy/learner$"]),
    },
}
_COMPARED = ("eval/greedy_success", "eval/sampled_success", "rollout/success", "time/seconds")  # beside hyperparameters
logger = logging.getLogger(__name__)


class Logger(Protocol):
    """Where a run's numbers go besides its folder. What it raises does not end the run (``guarded``)."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, iteration: int) -> None:
        """The run continues after ``iteration``: what was logged for later ones does not count."""

    def log_evaluation(
        self, iteration: int, kind: str, tasks: Sequence[Mapping[str, Any]], video: Path | None, frames: Sequence
    ) -> None:
        """``tasks``: rows of ``Evaluation.per_task``. ``video``: the film. ``frames``: uint8 [H, W, 3], without
        captions."""

    def close(self) -> None: ...


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Within the block, an observer of a run, whose failure is said and does not end the run."""
    try:
        yield
    except Exception as error:  # of disks, libraries, networks and codecs, which have no common base
        logger.warning("%s failed (%s: %s); the run goes on", what, type(error).__name__, error)


def open_loggers(path: Path, config: RunConfig, iteration: int | None) -> list[Logger]:
    """The loggers of the run in the folder ``path``, which is continued after ``iteration``; None: it is new."""
    loggers: list[Logger] = []
    if config.log.tensorboard:
        loggers.append(tensorboard := TensorBoardLogger(path / "tensorboard", config))
        if iteration is not None:
            with guarded("TensorBoard"):
                tensorboard.rewind(iteration)
    if config.log.wandb != "off":
        with guarded("W&B"):
            loggers.append(WandbLogger(path, config, config.log.wandb))
    return loggers


class TensorBoardLogger:
    """Its methods raise OSError if the disk has no room; what could not be written is written with what comes next."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder = folder
        self._config = config
        self._writer: Any = None  # a new file at the first event, and after a failure, which may leave part of a record
        self._unwritten: deque[Any] = deque(maxlen=_KEPT_EVENTS)
        self._is_described = False

    def rewind(self, iteration: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        session = SessionLog(status=SessionLog.START)  # hides the events of later iterations
        self._is_described = False  # at the beginning, it hides the description as well
        start = Event(wall_time=time.time(), step=iteration + 1, session_log=session)
        self._write(start, start)  # twice: TensorBoard without its data server takes the first one for the run's start

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write_summary(iteration, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

    def log_evaluation(
        self, iteration: int, kind: str, tasks: Sequence[Mapping[str, Any]], video: Path | None, frames: Sequence
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        lines = [_COLUMNS, ["---"] * len(_COLUMNS), *([_shown(row[name]) for name in _COLUMNS] for row in tasks)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        tensor = make_tensor_proto(np.array([text.encode()], dtype=object))
        about = create_summary_metadata(display_name="", description="")
        values = [Summary.Value(tag=f"eval/{kind}_tasks", metadata=about, tensor=tensor)]
        if frames:
            height, width = frames[0].shape[:2]
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=_gif(frames))
            values.append(Summary.Value(tag=f"eval/{kind}_video", image=image))
        self._write_summary(iteration, values)

    def _write_summary(self, iteration: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(Event(wall_time=time.time(), step=iteration, summary=Summary(value=values)))

    def _write(self, *events: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._unwritten.extend(events)
        if not self._is_described:
            self._unwritten.extend(_description(self._config))
            self._is_described = True
        try:
            self._writer = self._writer or RecordWriter(self._new_file())
            for waiting in self._unwritten:
                self._writer.write(waiting.SerializeToString())
            self._writer.flush()
        except OSError:
            with suppress(OSError):
                self.close()
            raise
        self._unwritten.clear()

    def _new_file(self) -> BinaryIO:
        """TensorBoard reads all files of a folder in the order of their names."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._folder.mkdir(exist_ok=True)
        self._unwritten.appendleft(Event(wall_time=time.time(), file_version="brain.Event:2"))
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        return (self._folder / name).open("xb")

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _description(config: RunConfig) -> list[Any]:
    """Events with the page of charts and with the hyperparameters, of which TensorBoard keeps a run's first ones.

    Made from TensorBoard's own messages: ``torch.utils.tensorboard`` would import torch, without which a driver runs.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.custom_scalar import metadata as page
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2
    from tensorboard.util.tensor_util import make_tensor_proto

    found = hyperparameters(config)
    types = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=types.get(type(value), api_pb2.DATA_TYPE_FLOAT64))
            for name, value in found.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in _COMPARED],
    )
    columns = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(experiment=experiment))
    categories = [
        layout_pb2.Category(title=title, chart=[_chart(name, *content) for name, content in charts.items()])
        for title, charts in _CHARTS.items()
    ]
    layout = np.array([layout_pb2.Layout(category=categories).SerializeToString()], dtype=object)
    described = [
        (page.CONFIG_SUMMARY_TAG, page.create_summary_metadata(), make_tensor_proto(layout)),
        (metadata.EXPERIMENT_TAG, columns, metadata.NULL_TENSOR),
    ]
    values = [Summary.Value(tag=tag, metadata=about, tensor=tensor) for tag, about, tensor in described]
    summaries = (Summary(value=values), summary_v2.hparams_pb(found))
    return [Event(wall_time=time.time(), summary=summary) for summary in summaries]


def _chart(title: str, kind: str, tags: Sequence[str]) -> Any:
    """One of ``_CHARTS``, as TensorBoard's message."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Chart, MarginChartContent, MultilineChartContent

    if kind == "Margin":
        value, lower, upper = tags
        series = MarginChartContent.Series(value=value, lower=lower, upper=upper)
        return Chart(title=title, margin=MarginChartContent(series=[series]))
    return Chart(title=title, multiline=MultilineChartContent(tag=tags))


def hyperparameters(config: RunConfig) -> dict[str, bool | int | float | str]:
    """What decides how a run learns: ``mode``, ``seed``, ``env.name``, and of policy, algorithm, learner and training
    every key whose value is a number or a word."""
    found: dict[str, Any] = {"mode": config.mode, "seed": config.seed, "env.name": config.env.name}
    groups = {"policy": config.policy, "algo": config.algo, "learner": config.learner, "train": config.train}
    for name, group in groups.items():
        found |= {f"{name}.{key}": value for key, value in group.model_dump().items()}
    return {key: value for key, value in found.items() if isinstance(value, bool | int | float | str)}


class WandbLogger:
    """The run's id is kept in its folder, so that a resumed run continues it. All is drawn over ``iteration``."""

    def __init__(self, path: Path, config: RunConfig, mode: Literal["offline", "online"]) -> None:
        import wandb

        file = path / "wandb_id"
        if not file.is_file():
            file.write_text(f"{path.absolute().name}-{uuid.uuid4().hex[:8]}")
        about: dict[str, Any] = {
            "project": config.log.wandb_project,
            "name": path.absolute().name,
            "id": file.read_text(),
            "entity": config.log.wandb_entity,
            "group": config.log.wandb_group,
            "tags": config.log.wandb_tags or None,  # None: as W&B's variables of the environment say
        }
        about |= {"dir": str(path), "config": config.model_dump()}
        settings = wandb.Settings(
            silent=True, init_timeout=_WANDB_START_S, finish_timeout=_WANDB_END_S, finish_timeout_raises=True
        )
        try:
            self._run = wandb.init(mode=mode, resume="allow" if mode == "online" else None, settings=settings, **about)
        except wandb.Error as error:
            wandb.teardown()  # what has failed still holds the id
            self._run = wandb.init(mode="offline", settings=settings, **about)  # `wandb sync` continues the run
            logger.warning(
                "log.wandb=online: W&B cannot be used now (%s). The run is logged offline; later: wandb sync %s",
                str(error).splitlines()[0],
                self._run.settings.sync_dir,
            )
        self._run.define_metric("*", step_metric="iteration")

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration} | dict(metrics))

    def rewind(self, iteration: int) -> None:
        """Points over ``iteration`` are drawn twice: there is no way to take them back."""

    def log_evaluation(
        self, iteration: int, kind: str, tasks: Sequence[Mapping[str, Any]], video: Path | None, frames: Sequence
    ) -> None:
        import wandb

        table = wandb.Table(columns=list(_COLUMNS), data=[[row[name] for name in _COLUMNS] for row in tasks])
        values: dict[str, Any] = {"iteration": iteration, f"eval/{kind}_tasks": table}
        if video is not None:
            values[f"eval/{kind}_video"] = wandb.Video(str(video), format="mp4")
        self._run.log(values)

    def close(self) -> None:
        kept = self._run.settings.sync_dir
        try:
            self._run.finish()
        except TimeoutError:
            logger.warning("W&B cannot be reached: not all of the run was uploaded; later: wandb sync %s", kept)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _gif(frames: Sequence[np.ndarray]) -> bytes:
    """An animation of at most ``_GIF_FRAMES`` of the frames."""
    from PIL import Image

    chosen = [frames[i] for i in np.linspace(0, len(frames) - 1, min(len(frames), _GIF_FRAMES)).astype(int)]
    images = [Image.fromarray(frame) for frame in chosen]
    for image in images:
        image.thumbnail((_GIF_SIZE, _GIF_SIZE))
    data = io.BytesIO()
    images[0].save(data, format="GIF", save_all=True, append_images=images[1:], duration=100, loop=0)
    return data.getvalue()
