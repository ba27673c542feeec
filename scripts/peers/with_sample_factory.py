"""Sample Factory's APPO: rollout workers, a policy worker and a learner, which run at the same time. Tabletop only."""

from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.algo.utils.tensor_dict import TensorDict
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.actor_critic import ActorCritic
from sample_factory.train import make_runner
from torch import Tensor

from peers.environments import NUM_BINS, chunk_env
from peers.network import Network
from peers.setting import PROCESSES, Clock, Setting, read_setting
from vla_rl.policies.openvla_oft.tokens import token_entropy, token_logprobs


def make_env(setting: Setting, name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
    """Tokens are declared as a vector of numbers, so that Sample Factory hands no logits from process to process."""
    env = chunk_env(setting, getattr(env_config, "env_id", None) or 0)
    env.action_space = spaces.Box(0, NUM_BINS - 1, env.action_space.shape, np.float32)
    return env


class Tokens:
    """The distribution of a chunk's tokens."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def log_prob(self, actions: Tensor) -> Tensor:
        return token_logprobs(self._logits, actions).sum(-1)

    def entropy(self) -> Tensor:
        return token_entropy(self._logits).sum(-1)

    def kl_divergence(self, other: Any) -> Tensor:
        """Only logged: not computed, in the peer's favour."""
        return torch.zeros(len(self._logits))


class Model(ActorCritic):
    """The network as Sample Factory calls it."""

    def __init__(self, setting: Setting, cfg: Any, obs_space: Any, action_space: Any) -> None:
        super().__init__(obs_space, action_space, cfg)
        self.network = Network(setting)

    def device_for_input_tensor(self, input_tensor_name: str) -> torch.device:
        return torch.device("cpu")

    def type_for_input_tensor(self, input_tensor_name: str) -> torch.dtype:
        return torch.uint8 if input_tensor_name == "image" else torch.float32

    def forward_head(self, normalized_obs_dict: dict[str, Tensor]) -> Tensor:
        logits, values = self.network.distribution(normalized_obs_dict["image"], normalized_obs_dict["numbers"])
        return torch.cat([logits.flatten(1), values[:, None]], 1)

    def forward_core(self, head_output: Tensor, rnn_states: Tensor) -> tuple[Tensor, Tensor]:
        return head_output, rnn_states

    def forward_tail(self, core_output: Tensor, values_only: bool, sample_actions: bool) -> Any:
        self.last_action_distribution = Tokens(core_output[:, :-1].unflatten(1, (-1, NUM_BINS)))
        return TensorDict(values=core_output[:, -1])

    def forward(self, normalized_obs_dict: dict[str, Tensor], rnn_states: Tensor, values_only: bool = False) -> Any:
        seen = normalized_obs_dict["image"], normalized_obs_dict["numbers"]
        if values_only:
            return TensorDict(values=self.network.value(*seen))
        tokens, logprobs, values = self.network.act(*seen)
        unused = {"action_logits": torch.zeros(len(tokens), 2 * tokens.shape[1]), "new_rnn_states": rnn_states}
        return TensorDict(actions=tokens.float(), log_prob_actions=logprobs, values=values, **unused)


class UntilTime(AlgoObserver):
    def __init__(self, setting: Setting, clock: Clock) -> None:
        self._chunks, self._clock = setting.chunks, clock

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        if not self._clock.goes_on(learned=training_iteration_since_resume * self._chunks):
            self._clock.end()


def main() -> None:
    setting = read_setting()
    algo, learner = setting.algo, setting.config.learner
    register_env("chunks", partial(make_env, setting))
    global_model_factory().register_actor_critic_factory(partial(Model, setting))
    given: dict[str, Any] = {
        "algo": "APPO",
        "env": "chunks",
        "train_dir": str(setting.folder),
        "experiment": "peer",
        "device": "cpu",
    }
    given |= {"num_workers": PROCESSES, "num_envs_per_worker": setting.per_process, "use_rnn": False}
    given |= {"rollout": max(1, setting.chunks // setting.environments), "normalize_input": False}
    given |= {"batch_size": setting.minibatch, "num_batches_per_epoch": algo.minibatches, "num_epochs": algo.epochs}
    given |= {"gamma": algo.gamma, "gae_lambda": algo.gae_lambda, "value_loss_coeff": algo.value_coef}
    given |= {"ppo_clip_ratio": algo.clip_low, "exploration_loss_coeff": algo.entropy_coef, "normalize_returns": False}
    given |= {"learning_rate": learner.lr, "max_grad_norm": learner.max_grad_norm, "save_every_sec": 10**6}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    runner.register_observer(UntilTime(setting, Clock(setting, "sample-factory")))
    runner.init()
    runner.run()


if __name__ == "__main__":
    main()
