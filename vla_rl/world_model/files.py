"""What a checkpoint holds of the world model.

world_model/
    archive.npz          the real episodes it learns from, as features
    model.safetensors    weights of the ensemble, once it has been trained
    adam.safetensors     the optimizer's moments
    generator.npy        state of the random numbers that draw its batches
    state.json           counters, the chunks of the audit and the predictions of the horizon's gate

    With a horizon above one chunk, also:
    frames.npz           the newest real episodes' frames
    frame_model.safetensors, frame_adam.safetensors, frame_generator.npy
    futures.npz          predicted frames beside real ones, to be looked at (`vla-rl world-model`)

All of it is data: reading it runs no code.
"""

from __future__ import annotations

import json
from pathlib import Path

from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.world_model.imagination import Imagination
from vla_rl.world_model.trainer import ModelTrainer


def save_world_model(folder: Path, trainer: ModelTrainer, imagination: Imagination) -> list[str]:
    """Write a new folder; returns the names of its files."""
    folder.mkdir()
    counters = trainer.save(folder)
    futures = None if imagination.futures is None else imagination.futures.save(folder)
    write_json(folder / "state.json", {"trainer": counters, "imagination": imagination.state(), "futures": futures})
    return sorted(path.name for path in folder.iterdir())


def load_world_model(folder: Path, trainer: ModelTrainer, imagination: Imagination) -> None:
    """Continue from ``save_world_model``. Raises UserError if there is nothing to read."""
    try:
        state = json.loads((folder / "state.json").read_text())
        trainer.load(folder, state["trainer"])
        imagination.restore(state["imagination"])
        if imagination.futures is not None and state.get("futures") is not None:
            imagination.futures.load(folder, state["futures"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} holds no state of a world model that can be read ({error}): the run was started without "
            "world_model; start a new one from its policy with policy.checkpoint"
        ) from error
