"""Write a small LeRobot data set (v3) of the tabletop, laid out as LeRobot's data sets of LIBERO.

python scripts/make_lerobot_twin.py FOLDER [--episodes N] [--writer lerobot]

The scripted expert plays; every fifth episode is spoiled, so that it fails. `--writer lerobot` lets the package lerobot
write the same episodes: several in a file, with its own video encoder.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np

from envs.base import empty_observation
from envs.base.lerobot_writer import EpisodeData, add_pending, save_episode
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import TabletopVectorEnv
from vla_rl.core.records import EnvSpec, EpisodeSpec

CONFIG = TabletopConfig(tasks=("reach",), image_size=64, max_episode_steps=32)


def play(env: TabletopVectorEnv, number: int, spoiled: bool) -> EpisodeData:
    """One episode of the expert; a spoiled one moves away from the target."""
    spec, seen = env.spec, empty_observation(env.spec, 1)
    task = number % len(spec.instructions)
    env.reset([0], [EpisodeSpec(number, task, seed=1000 + number)])
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray, float]] = []
    while True:
        env.observe([0], seen)
        action = env.expert_action(0) if not spoiled else np.array([-1, 1, 1, 0, 0, 0, 1], np.float32)
        result = env.step([0], action[None, None])
        rows.append((seen.images[0].copy(), seen.proprio[0].copy(), action, float(result.rewards[0, 0])))
        if result.terminated[0] or result.truncated[0]:
            images, proprio, actions, rewards = (np.stack(part) for part in zip(*rows, strict=True))
            success = bool(result.success[0])
            return EpisodeData(spec.instructions[task], images, proprio, actions, rewards.astype(np.float32), success)


def write_by_lerobot(folder: Path, episodes: list[EpisodeData], spec: EnvSpec) -> None:
    """The same episodes, written by the package lerobot."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    size, width = CONFIG.image_size, episodes[0].proprio.shape[1]
    video = {"dtype": "video", "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    features = {
        "observation.images.image": video,
        "observation.state": {"dtype": "float32", "shape": (width,), "names": None},
        "action": {"dtype": "float32", "shape": (len(spec.actions),), "names": list(spec.actions.names)},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }
    data = LeRobotDataset.create("vla_rl/twin", fps=spec.fps, features=features, root=folder, robot_type=spec.robot)
    for episode in episodes:
        for step, action in enumerate(spec.actions.to_data(episode.actions).astype(np.float32)):
            last = step == len(episode.actions) - 1
            frame = {
                "observation.images.image": episode.images[step, 0],
                "observation.state": episode.proprio[step],
                "action": action,
                "next.reward": episode.rewards[step : step + 1],
                "next.done": np.array([last]),
                "next.success": np.array([last and episode.success]),
                "task": episode.instruction,
            }
            data.add_frame(frame)
        data.save_episode()
    data.finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small LeRobot data set of the tabletop.")
    parser.add_argument("folder", type=Path, help="the new data set; an older one is replaced")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--writer", choices=["vla_rl", "lerobot"], default="vla_rl")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    env = TabletopVectorEnv(CONFIG, 1)
    episodes = [play(env, number, spoiled=number % 5 == 4) for number in range(args.episodes)]
    if args.writer == "lerobot":
        write_by_lerobot(args.folder, episodes, env.spec)
    else:
        for episode in episodes:
            save_episode(args.folder, episode, env.spec)
        add_pending(args.folder, env.spec)
    successes = sum(episode.success for episode in episodes)
    print(f"{args.folder}: {len(episodes)} episodes, {successes} successful")


if __name__ == "__main__":
    main()
