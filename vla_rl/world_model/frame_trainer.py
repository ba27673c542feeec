"""Trains the frame model on the newest real episodes, and predicts frames with it meanwhile."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.records import Array
from vla_rl.core.tensor_files import load_tensors, moments_of, save_tensors, set_moments
from vla_rl.observability.meter import Meter
from vla_rl.world_model.composed_frames import ComposedFrames
from vla_rl.world_model.diffusion_frames import DiffusionFrames
from vla_rl.world_model.frame_archive import FrameArchive, FrameEpisode
from vla_rl.world_model.frames import FrameInputs, FrameModel


class FrameTrainer:
    """Model, optimizer and frames. Thread-safe: one thread trains while others predict.

    Others see the weights of the last finished call of ``learn``, so that no prediction waits for training.
    """

    def __init__(
        self, config: WorldModelConfig, seed: int, device: str = "cpu", lease: DeviceLease = nullcontext
    ) -> None:
        self.meter = Meter()
        self.archive = FrameArchive(config.frame_episodes)
        self.loss = float("nan")  # of the last call of ``learn``, mean over its steps
        self._config, self._seed, self._device, self._lease = config, seed, torch.device(device), lease
        self._generator = torch.Generator().manual_seed(seed)
        self._model: FrameModel | None = None
        self._published: FrameModel | None = None  # a copy, for predictions
        self._optimizer: torch.optim.AdamW
        self._lock = threading.Lock()  # of the archive and the published copy
        self._learning = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether there is a trained model."""
        return self._published is not None

    def learn(self, episode: FrameEpisode) -> None:
        """Add a real episode to the archive, and train as much as it is due, once there are two of them."""
        with self._learning:
            with self._lock:
                self.archive.add(episode)
            if len(self.archive.episodes) < 2:
                return
            self._make()
            assert self._model is not None
            chunks = len(episode.images) - 1
            steps = max(1, round(chunks * self._config.frame_samples_per_chunk / self._config.frame_batch))
            with self.meter.time("frame_train", chunks):
                self.loss = sum(self._step() for _ in range(steps)) / steps
            with self._lock:
                self._published = copy.deepcopy(self._model).eval()

    def _make(self) -> None:
        if self._model is not None:
            return
        episode = self.archive.episodes[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            model = _make_model(self._config, episode.images.shape[1], episode.proprio.shape[1])
        self._model = model.to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self._config.frame_lr)

    def _step(self) -> float:
        assert self._model is not None
        with self._lock:
            inputs, after = self.archive.sample(self._config.frame_batch, self._generator)
        with self._lease():
            loss = self._model.loss(self._moved(inputs), after.to(self._device), self._generator)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            return loss.item()

    def _moved(self, inputs: FrameInputs) -> FrameInputs:
        return FrameInputs(*(getattr(inputs, f.name).to(self._device) for f in fields(inputs)))

    @torch.no_grad()
    def predict(self, current: Array, first: Array, task: Array, proprio: Array, after: Array) -> Array:
        """Frames after n chunks: uint8 [n, V, H, W, 3]. Arguments as of ``FrameArchive.inputs``.

        Raises RuntimeError before ``ready``.
        """
        with self._lock:
            model = self._published
            if model is None:
                raise RuntimeError("the frame model has not been trained yet")
            inputs = self.archive.inputs(current, first, task, proprio, after)
        with self.meter.time("frames", len(current)), self._lease():
            frames: Array = (model(self._moved(inputs)) * 255).round().to(torch.uint8).cpu().numpy()
        return frames

    def save(self, folder: Path) -> dict[str, Any]:
        """Write frames, weights and optimizer; returns JSON-able counters for ``load``."""
        with self._learning, self._lock:
            self.archive.save(folder / "frames.npz")
            if self._model is not None:
                save_tensors(self._model.state_dict(), folder / "frame_model.safetensors")
                save_tensors(moments_of(self._optimizer), folder / "frame_adam.safetensors")
            np.save(folder / "frame_generator.npy", self._generator.get_state().numpy())
            return {"loss": self.loss if np.isfinite(self.loss) else None}

    def load(self, folder: Path, counters: dict[str, Any]) -> None:
        """Continue from ``save``."""
        with self._learning, self._lock:
            self.archive.load(folder / "frames.npz")
            self._generator.set_state(torch.from_numpy(np.load(folder / "frame_generator.npy")))
            self.loss = float("nan") if counters["loss"] is None else counters["loss"]
            if not (folder / "frame_model.safetensors").is_file():
                return
            self._make()
            assert self._model is not None
            self._model.load_state_dict(load_tensors(folder / "frame_model.safetensors"))
            set_moments(self._optimizer, load_tensors(folder / "frame_adam.safetensors"))
            self._published = copy.deepcopy(self._model).eval()


def _make_model(config: WorldModelConfig, views: int, proprio: int) -> FrameModel:
    if config.frame_model == "composed":
        return ComposedFrames(views, proprio, config.frame_width)
    size = config.diffusion_width, config.diffusion_depth, config.diffusion_patch, config.diffusion_steps
    return DiffusionFrames(views, proprio, *size)
