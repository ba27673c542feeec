"""What changes a policy's success on LIBERO: the same policy, evaluated with one thing changed at a time.

    python scripts/libero_numbers.py CHECKPOINT CONFIG --episodes 200 [--only TEXT] [--json FILE]

Prints the table of docs/libero_numbers.md. "Won" and "lost" are episodes that turned out otherwise than with nothing
changed. The rows with a newer MuJoCo need ``bash scripts/setup.sh --test``.
Its two simulators, ``env.name=libero_numbers:JpegLibero`` and ``libero_numbers:RotatedLibero``, change only the images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from envs import env_spec, make_env
from envs.base.wrapper import EnvWrapper
from envs.libero.config import LiberoConfig
from vla_rl import load_config
from vla_rl.core.records import EnvSpec, Observation

ROOT = Path(__file__).resolve().parents[1]
NEWER = Path(sys.prefix) / "newer_mujoco"
MUJOCO = "MuJoCo 3.8.1"
JPEG_QUALITY = 95  # as TensorFlow's encoder and the data sets of the OpenVLA papers have it
VARIANTS: dict[str, list[str]] = {
    "nothing": [],
    "nothing, once more": [],
    "other placements of the fixtures (seed=1)": ["seed=1"],
    MUJOCO: [],
    f"{MUJOCO}, env.settled=reference": ["env.settled=reference"],
    "env.settled=reference": ["env.settled=reference"],
    "env.antialiasing={not_antialiasing}": ["env.antialiasing={not_antialiasing}"],
    "images rotated by 180 degrees": ["env.name=libero_numbers:RotatedLibero", "{keys}"],
    "images through JPEG, quality 95": ["env.name=libero_numbers:JpegLibero", "{keys}"],
    "no settling steps": ["env.settle_steps=0"],
    "20 settling steps": ["env.settle_steps=20"],
    "half of the time limit": ["env.max_episode_steps={half}"],
    "twice the time limit": ["env.max_episode_steps={twice}"],
}


def main() -> int:
    """Evaluate each variant in processes of its own."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("checkpoint")
    parser.add_argument("config")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--only", default="", help="variants whose names contain this text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    env = load_config(args.config).env
    assert isinstance(env, LiberoConfig)
    limit = env_spec(env).max_episode_steps
    words = {"not_antialiasing": str(not env.antialiasing).lower(), "half": limit // 2, "twice": 2 * limit}
    given = env.model_dump(mode="json", exclude_unset=True, exclude={"name"})  # another env.name resets them
    words["keys"] = " ".join(f"env.{name}={json.dumps(value, separators=(',', ':'))}" for name, value in given.items())
    found: dict[str, dict[str, Any]] = {}
    print("| changed | success | 95 % | won | lost |\n| --- | ---: | ---: | ---: | ---: |")
    for name, overrides in VARIANTS.items():
        if args.only in name and (MUJOCO not in name or NEWER.is_dir()):
            changes = [change for text in overrides for change in text.format(**words).split()]
            result = evaluation(args, changes, newer=MUJOCO in name)
            found[name.format(**words)] = result
            print(row(name.format(**words), result, next(iter(found.values()))), flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def row(name: str, result: dict[str, Any], first: dict[str, Any]) -> str:
    """Success, and the episodes that succeed here alone, and in the first variant alone."""
    low, high = (100 * result[f"success_{end}95"] for end in ("low", "high"))
    pairs = list(zip(result["outcomes"], first["outcomes"], strict=True))
    turned = (sum(pair == (1, 0) for pair in pairs), sum(pair == (0, 1) for pair in pairs))
    return f"| {name} | {100 * result['success']:.1f} % | {low:.0f} to {high:.0f} % | {turned[0]} | {turned[1]} |"


def evaluation(args: argparse.Namespace, overrides: list[str], *, newer: bool) -> dict[str, Any]:
    """Totals, tasks and outcomes of one evaluation."""
    path = [str(NEWER)] * newer + [str(ROOT), str(ROOT / "scripts")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "vla_rl.commands.cli", "eval", args.checkpoint, "--config", args.config]
        command += [*overrides, "--episodes", str(args.episodes), "--json", str(file)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        result = json.loads(file.read_text())
    kept = ("engine", "assets", "episodes", "successes", "success", "success_low95", "success_high95", "mean_steps")
    about = {"overrides": overrides} | {name: result[name] for name in kept}
    tasks = [task["successes"] for task in result["tasks"]]
    return about | {"successes_of_tasks": tasks, "outcomes": [int(run["success"]) for run in result["runs"]]}


def _plain(config: Any) -> LiberoConfig:
    return LiberoConfig(**{name: getattr(config, name) for name in LiberoConfig.model_fields if name != "name"})


class RotatedLibero(EnvWrapper):
    """LIBERO whose images are as robosuite renders them: rotated by 180 degrees."""

    class Config(LiberoConfig):
        """The keys of LIBERO."""

    def __init__(self, config: Any, num_envs: int) -> None:
        super().__init__(make_env(_plain(config), num_envs))

    @staticmethod
    def env_spec(config: Any) -> EnvSpec:
        """Of LIBERO itself."""
        return env_spec(_plain(config))

    def observe(self, env_ids: Sequence[int], out: Observation) -> None:
        """See ``VectorEnv``."""
        self._env.observe(env_ids, out)
        for env_id in env_ids:
            for view in out.images[env_id]:
                view[:] = self.changed(view)

    def changed(self, image: np.ndarray) -> np.ndarray:
        """Of one view, (height, width, 3) uint8."""
        return image[::-1, ::-1].copy()


class JpegLibero(RotatedLibero):
    """LIBERO whose images have been JPEG files."""

    def changed(self, image: np.ndarray) -> np.ndarray:
        """Of one view, (height, width, 3) uint8."""
        _, data = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        seen = cv2.imdecode(data, cv2.IMREAD_COLOR)
        assert seen is not None
        return seen[..., ::-1]


if __name__ == "__main__":
    sys.exit(main())
