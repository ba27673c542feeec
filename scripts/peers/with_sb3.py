"""Stable-Baselines3: SubprocVecEnv and PPO."""

from functools import partial
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from torch import Tensor

from peers.environments import chunk_env
from peers.network import Network
from peers.setting import PROCESSES, Clock, Setting, read_setting


class NoFeatures(BaseFeaturesExtractor):
    """The network reads observations itself."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, features_dim=1)


class Policy(ActorCriticPolicy):
    """The network in the place of features, MLPs and heads."""

    def __init__(self, *arguments: Any, setting: Setting, **others: Any) -> None:
        self._setting = setting
        super().__init__(*arguments, **others)

    def _build(self, lr_schedule: Any) -> None:
        self.network = Network(self._setting)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=lr_schedule(1), eps=1e-5)

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        tokens, logprobs, values = self.network.act(obs["image"], obs["numbers"])
        return tokens, values[:, None], logprobs

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, values = self.network.rate(obs["image"], obs["numbers"], actions)
        return values[:, None], logprobs, entropy

    def predict_values(self, obs: Any) -> Tensor:
        return self.network.value(obs["image"], obs["numbers"])[:, None]


class UntilTime(BaseCallback):
    """A rollout begins where an update has ended."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._goes_on, self._begun = clock, True, False

    def _on_rollout_start(self) -> None:
        if self._begun:
            self._goes_on = self._clock.goes_on()
        self._begun = True

    def _on_step(self) -> bool:
        return self._goes_on


def main() -> None:
    setting = read_setting()
    torch.set_num_threads(PROCESSES)  # environments wait while it learns
    makers: list[Any] = [partial(chunk_env, setting, number) for number in range(setting.environments)]
    env = SubprocVecEnv(makers) if setting.libero else DummyVecEnv(makers)  # as its guide says of cheap environments
    algo, clock = setting.algo, Clock(setting, "stable-baselines3")
    model = PPO(
        Policy,
        env,
        learning_rate=setting.config.learner.lr,
        n_steps=setting.chunks // setting.environments,
        batch_size=setting.minibatch,
        n_epochs=algo.epochs,
        gamma=algo.gamma,
        gae_lambda=algo.gae_lambda,
        clip_range=algo.clip_low,
        vf_coef=algo.value_coef,
        max_grad_norm=setting.config.learner.max_grad_norm,
        policy_kwargs={"setting": setting, "features_extractor_class": NoFeatures},
        device="cpu",
    )
    model.learn(10**9, callback=UntilTime(clock))
    clock.end()


if __name__ == "__main__":
    main()
