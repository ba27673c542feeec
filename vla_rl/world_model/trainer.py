"""Trains the world model on the archive, and rates chunks with it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.config.world_model import WorldModelConfig
from vla_rl.core.records import Array
from vla_rl.core.tensor_files import load_tensors, moments_of, save_tensors, set_moments
from vla_rl.observability.meter import Meter
from vla_rl.world_model.archive import Archive, Episode
from vla_rl.world_model.imagined_env import ChunkRating
from vla_rl.world_model.model import WorldModel


class ModelTrainer:
    """Model, optimizer and archive. Thread-safe: one thread trains while others rate."""

    def __init__(self, config: WorldModelConfig, seed: int, discount: float) -> None:
        self.meter = Meter()
        self.archive = Archive(config.archive_episodes)
        self.version = 0  # calls of ``learn`` that have trained the model
        self.losses: dict[str, float] = {}  # of the last call of ``learn``, mean over its steps and the members
        self._config, self._seed, self._discount = config, seed, discount
        self._generator = torch.Generator().manual_seed(seed)
        self._model: WorldModel | None = None
        self._optimizer: torch.optim.AdamW
        self._lock = threading.Lock()  # of weights and archive
        self._learning = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether there is a trained model."""
        return self.version > 0

    def learn(self, episodes: Sequence[Episode]) -> None:
        """Add real episodes to the archive, and train as much as they are due once there are enough.

        The first training makes up for the episodes that came before.
        """
        with self._learning:
            self._learn(episodes)

    def _learn(self, episodes: Sequence[Episode]) -> None:
        with self._lock:
            self.archive.add(episodes)
        if self.archive.num_added < self._config.warmup_episodes or (self._config.frozen and self.ready):
            return
        due = self.archive.num_chunks if self._model is None else sum(len(e.event) for e in episodes)
        if self._model is None:
            with self._lock:
                self._make()
        steps = max(1, round(due * self._config.samples_per_chunk / self._config.batch))
        sums: dict[str, float] = {}
        with self.meter.time("model_train", due):
            for _ in range(steps):
                for name, value in self._step().items():
                    sums[name] = sums.get(name, 0.0) + value / steps / self._config.members
        self.losses = sums
        self.version += 1

    def _make(self) -> None:
        scales, c = self.archive.scales or self.archive.freeze_scales(), self._config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            self._model = WorldModel(
                len(scales.features.mean),
                len(scales.proprio.mean),
                self.archive.chunk_size,
                len(scales.actions.mean),
                c.members,
                c.width,
            )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=c.lr, weight_decay=c.weight_decay)

    def _step(self) -> dict[str, float]:
        assert self._model is not None
        with self._lock:
            inputs, outcomes = self.archive.sample((self._config.members, self._config.batch), self._generator)
            losses = self._model.loss(inputs, outcomes, self._config.hindsight)
            self._optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()
            self._optimizer.step()
        return {name: loss.item() for name, loss in losses.items()}

    def standardized(self, proprio: Array) -> Array:
        """Proprioception on the model's scale. Raises RuntimeError before ``ready``."""
        if self.archive.scales is None:
            raise RuntimeError("the world model has not been trained yet")
        return self.archive.scales.proprio(proprio)

    def rate(self, features: Array, proprio: Array, elapsed: Array, actions: Array) -> ChunkRating:
        """Rate n chunks: [n, F], [n, P], [n] and, in physical units, [n, K, A].

        Raises RuntimeError before ``ready``.
        """
        if self._model is None or self.archive.scales is None:
            raise RuntimeError("the world model has not been trained yet")
        inputs = self.archive.scales.inputs(features, proprio, elapsed, actions)
        with self._lock, self.meter.time("imagine", len(actions)):
            rating = self._model.rate(inputs, self._discount)
        arrays = {f.name: getattr(rating, f.name).numpy() for f in fields(rating)}
        return ChunkRating(**arrays | {"next_proprio": self.archive.scales.proprio.undo(arrays["next_proprio"])})

    def save(self, folder: Path) -> dict[str, Any]:
        """Write archive, weights and optimizer; returns JSON-able counters for ``load``."""
        with self._lock:
            self.archive.save(folder / "archive.npz")
            if self._model is not None:
                save_tensors(self._model.state_dict(), folder / "model.safetensors")
                save_tensors(moments_of(self._optimizer), folder / "adam.safetensors")
            np.save(folder / "generator.npy", self._generator.get_state().numpy())
            return {"version": self.version}

    def load(self, folder: Path, counters: dict[str, Any]) -> None:
        """Continue from ``save``."""
        with self._lock:
            self.archive.load(folder / "archive.npz")
            self._generator.set_state(torch.from_numpy(np.load(folder / "generator.npy")))
            self.version = counters["version"]
            if not (folder / "model.safetensors").is_file():
                return
            self._make()
            assert self._model is not None
            self._model.load_state_dict(load_tensors(folder / "model.safetensors"))
            set_moments(self._optimizer, load_tensors(folder / "adam.safetensors"))
