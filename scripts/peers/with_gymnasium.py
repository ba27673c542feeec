"""gymnasium's AsyncVectorEnv and a plain PPO loop; LIBERO in LeRobot's LiberoEnv, in the drop-in without it."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from envs.libero.benchmark_worker import LeRobot
from envs.libero.benchmark_worker import Setup as LeRobotSetup
from envs.libero.bootstrap import import_libero
from envs.libero.protocol.conventions import pose, to_robosuite
from peers.environments import ChunkEnv, Seen, chunk_env, decode
from peers.network import Network
from peers.setting import PROCESSES, Clock, Setting, read_setting


class LeRobotChunks(ChunkEnv):
    """LeRobot's environment, unchanged. It draws both cameras at each control step, and resets itself at success."""

    def _build(self) -> None:
        config, env = self.setting.config, self.setting.env
        import_libero(env.assets)
        setup = LeRobotSetup(env.suite, env.tasks[0], env.tasks[0], 1, env.image_size, config.policy.chunk_size)
        LeRobot.options = {"obs_type": "pixels_agent_pos"}
        self._lerobot: Any = LeRobot(setup)._env

    def _begin(self, episode: int) -> Seen:
        self._steps = 0
        self._lerobot.init_state_id = episode
        return self._seen(self._lerobot.reset(seed=episode)[0])

    def _play(self, tokens: np.ndarray) -> tuple[Seen, bool, bool]:
        before, limit = self._steps, self.setting.spec.max_episode_steps
        for command in to_robosuite(decode(self.setting, tokens)):
            obs, _, success, _, _ = self._lerobot.step(command)
            self._steps += 1
            if success or self._steps == limit:
                break
        self.setting.count(self._steps - before)
        return self._seen(obs), bool(success), bool(success) or self._steps == limit

    def _seen(self, obs: dict[str, Any]) -> Seen:
        robot, elapsed = obs["robot_state"], self._steps / self.setting.spec.max_episode_steps
        parts = pose(robot["eef"]["pos"], robot["eef"]["quat"], robot["gripper"]["qpos"])
        image = obs["pixels"]["image"][::-1, ::-1].copy()
        return {"image": image, "numbers": np.array([*parts, elapsed, 0.0], np.float32)}


def make_env(setting: Setting, number: int) -> gymnasium.Env:
    return LeRobotChunks(setting, number) if setting.simulator == "theirs" else chunk_env(setting, number)


class Rollouts:
    """Plays as many chunks as an update needs."""

    def __init__(self, setting: Setting, network: Network) -> None:
        kind: Any = partial(AsyncVectorEnv, context="spawn") if setting.libero else SyncVectorEnv
        makers = [partial(make_env, setting, number) for number in range(setting.environments)]
        self._envs = kind(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self._network, self._length = network, setting.chunks // setting.environments
        self._seen, _ = self._envs.reset()

    def play(self) -> dict[str, Tensor]:
        """Tensors [T, N, ...]; "last_value" [N] is that of the observation after the last chunk."""
        steps = []
        for _ in range(self._length):
            seen = {name: torch.from_numpy(array) for name, array in self._seen.items()}
            tokens, logprobs, values = self._network.act(**seen)
            self._seen, rewards, terminated, truncated, _ = self._envs.step(tokens.numpy())
            ends = {"rewards": torch.from_numpy(rewards).float(), "ended": torch.from_numpy(terminated | truncated)}
            steps.append(seen | ends | {"tokens": tokens, "logprobs": logprobs, "values": values})
        last = {name: torch.from_numpy(array) for name, array in self._seen.items()}
        played = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
        return played | {"last_value": self._network.value(**last)}


def advantages(played: dict[str, Tensor], gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation [T, N] (arXiv:1506.02438); an episode's end has no value."""
    found, following, carried = [], played["last_value"], torch.zeros_like(played["last_value"])
    for reward, value, ended in zip(*(played[name].flip(0) for name in ("rewards", "values", "ended")), strict=True):
        carried = reward - value + gamma * ~ended * (following + gae_lambda * carried)
        following = value
        found.append(carried)
    return torch.stack(found[::-1])


def learn(setting: Setting, network: Network, optimizer: torch.optim.Optimizer, played: dict[str, Tensor]) -> None:
    """The clipped surrogate (arXiv:1707.06347), in minibatches."""
    algo = setting.algo
    gains = advantages(played, algo.gamma, algo.gae_lambda)
    whole = played | {"gains": gains, "returns": gains + played["values"]}
    data = {name: value.flatten(0, 1) for name, value in whole.items() if name != "last_value"}
    data["gains"] = (data["gains"] - data["gains"].mean()) / (data["gains"].std() + 1e-8)
    for _ in range(algo.epochs):
        for rows in torch.randperm(setting.chunks).split(setting.minibatch):
            part = {name: value[rows] for name, value in data.items()}
            logprobs, entropy, values = network.rate(part["image"], part["numbers"], part["tokens"])
            ratio = (logprobs - part["logprobs"]).exp()
            clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
            policy_loss = -torch.min(ratio * part["gains"], clipped * part["gains"]).mean()
            value_loss = 0.5 * (values - part["returns"]).square().mean()
            optimizer.zero_grad()
            (policy_loss + algo.value_coef * value_loss - algo.entropy_coef * entropy.mean()).backward()
            nn.utils.clip_grad_norm_(network.parameters(), setting.config.learner.max_grad_norm)
            optimizer.step()


def main() -> None:
    setting = read_setting()
    torch.set_num_threads(PROCESSES)  # environments wait while it acts and learns
    network, clock = Network(setting), Clock(setting, "gymnasium")
    optimizer = torch.optim.AdamW(network.parameters(), lr=setting.config.learner.lr)
    rollouts = Rollouts(setting, network)
    learn(setting, network, optimizer, rollouts.play())
    while clock.goes_on():
        learn(setting, network, optimizer, rollouts.play())
    clock.end()


if __name__ == "__main__":
    main()
