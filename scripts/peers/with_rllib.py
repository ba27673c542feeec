"""RLlib, new API stack: two env runners that act themselves, and PPO with the learner in this process."""

from typing import Any

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune.registry import register_env
from torch import Tensor

from peers.environments import chunk_env
from peers.network import Network
from peers.setting import PROCESSES, Clock, read_setting


class Rated:
    """A distribution whose inputs are an action's log-probability and the entropy: the network has rated the action."""

    def __init__(self, rated: Tensor) -> None:
        self._rated = rated

    @classmethod
    def from_logits(cls, logits: Tensor, **others: Any) -> "Rated":
        return cls(logits)

    def logp(self, value: Tensor) -> Tensor:
        return self._rated[:, 0]

    def entropy(self) -> Tensor:
        return self._rated[:, 1]


class Module(TorchRLModule, ValueFunctionAPI):
    """The network. Runners sample actions themselves, so that no logits travel."""

    def setup(self) -> None:
        given: Any = self.model_config
        self.network = Network(given["setting"])
        self.action_dist_cls = Rated

    def _forward(self, batch: dict[str, Any], **others: Any) -> dict[str, Tensor]:
        tokens, logprobs, _ = self.network.act(*_seen(batch))
        rated = torch.stack([logprobs, torch.zeros_like(logprobs)], 1)
        return {Columns.ACTIONS: tokens, Columns.ACTION_LOGP: logprobs, Columns.ACTION_DIST_INPUTS: rated}

    def _forward_train(self, batch: dict[str, Any], **others: Any) -> dict[str, Tensor]:
        logprobs, entropy, values = self.network.rate(*_seen(batch), batch[Columns.ACTIONS])
        return {Columns.ACTION_DIST_INPUTS: torch.stack([logprobs, entropy], 1), Columns.EMBEDDINGS: values}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        return self.network.value(*_seen(batch)) if embeddings is None else embeddings


def _seen(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return batch[Columns.OBS]["image"], batch[Columns.OBS]["numbers"]


def main() -> None:
    setting = read_setting()
    algo, learner = setting.algo, setting.config.learner
    spaces = chunk_env(setting, 0)
    ray.init(num_cpus=PROCESSES + 1, include_dashboard=False, object_store_memory=2**29, log_to_driver=False)
    register_env("chunks", lambda given: chunk_env(given["setting"], given.worker_index - 1))
    config = (
        PPOConfig()
        .environment("chunks", env_config={"setting": setting})
        .environment(observation_space=spaces.observation_space, action_space=spaces.action_space)
        .env_runners(num_env_runners=PROCESSES, num_envs_per_env_runner=setting.per_process)
        .env_runners(rollout_fragment_length="auto", sample_timeout_s=3600)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Module, model_config={"setting": setting}))
        .training(
            lr=learner.lr,
            gamma=algo.gamma,
            lambda_=algo.gae_lambda,
            clip_param=algo.clip_low,
            vf_loss_coeff=algo.value_coef,
            entropy_coeff=algo.entropy_coef,
            use_kl_loss=False,
            grad_clip=learner.max_grad_norm,
            train_batch_size_per_learner=setting.chunks,
            minibatch_size=setting.minibatch,
            num_epochs=algo.epochs,
        )
        .evaluation(evaluation_interval=None)
    )
    algorithm, clock = config.build_algo(), Clock(setting, "ray")
    torch.set_num_threads(PROCESSES)  # runners wait while it learns
    algorithm.train()
    while clock.goes_on():
        algorithm.train()
    ray.shutdown()
    clock.end()


if __name__ == "__main__":
    main()
