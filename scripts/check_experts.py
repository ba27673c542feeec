"""Play a simulator's scripted expert: the table of docs/metaworld.md, for any config whose simulator has an expert.

    python scripts/check_experts.py configs/metaworld_ppo.yaml env.tasks=[] env.max_episode_steps=500 --episodes 20

Episodes begin at the benchmark's initial states. "Blind" repeats the mean action that the expert took at each step of
these episodes, without looking, in as many other ones: what a policy can do that sees nothing.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from envs import EnvConfig, env_spec, make_env
from envs.base import VectorEnv
from vla_rl import load_config
from vla_rl.core.machine import Machine
from vla_rl.core.records import EpisodeSpec


def main() -> int:
    """Print one row for each task."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--episodes", type=int, default=20)
    args = parser.parse_args()
    config = load_config(args.config, args.overrides).env
    spec = env_spec(config)
    print(f"{spec.name}, {spec.engine}\n")
    print("| task | expert | steps, mean (least to most) | blind |\n| --- | ---: | ---: | ---: |")
    with ProcessPoolExecutor(Machine.detect().cpus, get_context("spawn")) as pool:
        rows = [pool.submit(_row, config, task, args.episodes) for task in range(len(spec.instructions))]
        for row in rows:
            print(row.result(), flush=True)
    return 0


def _row(config: EnvConfig, task: int, episodes: int) -> str:
    env = make_env(config, 1)
    played = [_play(env, task, number) for number in range(episodes)]
    solved = [actions for actions, success in played if success]
    blind = _mean_actions([actions for actions, _ in played])
    lucky = sum(_play(env, task, episodes + number, blind)[1] for number in range(episodes))
    env.close()
    lengths = [len(actions) for actions in solved]
    steps = f"{np.mean(lengths):.0f} ({min(lengths)} to {max(lengths)})" if lengths else ""
    name = getattr(config, "chosen", env.spec.instructions)[task]
    return f"| {name} | {len(solved)} of {episodes} | {steps} | {lucky} of {episodes} |"


def _play(env: VectorEnv, task: int, state: int, plan: np.ndarray | None = None) -> tuple[np.ndarray, bool]:
    """The actions [T, A] of an episode, and whether it succeeds."""
    env.reset([0], [EpisodeSpec(id=state, task=task, seed=0, init_state=state)])
    actions: list[np.ndarray] = []
    while len(actions) < (env.spec.max_episode_steps if plan is None else len(plan)):
        actions.append(env.expert_action(0) if plan is None else plan[len(actions)])
        result = env.step([0], actions[-1][None, None])
        if result.terminated[0] or result.truncated[0]:
            return np.array(actions), bool(result.success[0])
    return np.array(actions), False


def _mean_actions(episodes: list[np.ndarray]) -> np.ndarray:
    """float32 [longest, A]: at each step, of the episodes that still run."""
    longest = max(map(len, episodes))
    steps = [np.mean([actions[t] for actions in episodes if t < len(actions)], axis=0) for t in range(longest)]
    return np.array(steps, np.float32)


if __name__ == "__main__":
    sys.exit(main())
