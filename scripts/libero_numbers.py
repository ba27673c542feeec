"""What changes a policy's success on LIBERO: the same policy, evaluated with one thing changed at a time.

    python scripts/libero_numbers.py CHECKPOINT CONFIG --episodes 200 [--only TEXT] [--json FILE]

Prints the table of docs/libero_numbers.md. The rows with a newer MuJoCo need ``bash scripts/setup.sh --test``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEWER = Path(sys.prefix) / "newer_mujoco"
MUJOCO = "MuJoCo 3.8.1"
VARIANTS: dict[str, list[str]] = {
    "as it is": [],
    MUJOCO: [],
    f"{MUJOCO}, env.settled=reference": ["env.settled=reference"],
    "env.settled=reference": ["env.settled=reference"],
    "the other renderer setting (env.antialiasing)": ["env.antialiasing={not_antialiasing}"],
    "images as robosuite renders them, rotated by 180 degrees": ["env.name=libero_variants:RotatedLibero"],
    "images that have been JPEG files, quality 95": ["env.name=libero_variants:JpegLibero"],
    "no settling steps (env.settle_steps=0)": ["env.settle_steps=0"],
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
    from envs import env_spec
    from envs.libero.config import LiberoConfig
    from vla_rl import load_config

    config = load_config(args.config)
    assert isinstance(config.env, LiberoConfig)
    limit = env_spec(config.env).max_episode_steps
    words = {"not_antialiasing": str(not config.env.antialiasing).lower(), "half": limit // 2, "twice": 2 * limit}
    found = {}
    print("| changed | success | 95 % |\n| --- | ---: | ---: |")
    for name, overrides in VARIANTS.items():
        if args.only in name and (MUJOCO not in name or NEWER.is_dir()):
            found[name] = evaluation(args, [text.format(**words) for text in overrides], newer=MUJOCO in name)
            low, high = (100 * found[name][f"success_{end}95"] for end in ("low", "high"))
            print(f"| {name} | {100 * found[name]['success']:.1f} % | {low:.0f} to {high:.0f} % |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def evaluation(args: argparse.Namespace, overrides: list[str], *, newer: bool) -> dict[str, Any]:
    """The totals of one evaluation."""
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
    return {"overrides": overrides} | {name: result[name] for name in kept}


if __name__ == "__main__":
    sys.exit(main())
