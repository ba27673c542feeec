"""TorchRL: MultiSyncCollector, GAE and ClipPPOLoss; LIBERO in its own LiberoEnv, which wraps OffScreenRenderEnv."""

from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Bounded
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.envs.libs.libero import LiberoEnv
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from peers.environments import NUM_BINS, chunk_env, libero_class
from peers.network import Network
from peers.setting import PROCESSES, Clock, Setting, read_setting


class ChunkedLiberoEnv(LiberoEnv):
    """TorchRL's environment of a LIBERO task, over an ``OffScreenRenderEnv`` that takes the tokens of chunks."""

    def __init__(self, setting: Setting) -> None:
        kind = libero_class(setting)  # imports LIBERO
        import libero.libero.envs

        libero.libero.envs.OffScreenRenderEnv = kind
        env, self._tokens = setting.env, setting.config.policy.chunk_size * setting.spec.action_dim
        given: dict[str, Any] = {"camera_height": env.image_size, "camera_width": env.image_size}
        given |= {"proprio_keys": ("numbers",), "settle_steps": env.settle_steps, "max_episode_steps": None}
        super().__init__(env.suite, env.tasks[0], **given)

    def _make_specs(self, env: Any) -> None:
        super()._make_specs(env)
        self.action_spec = Bounded(0, NUM_BINS - 1, (self._tokens,), dtype=torch.int64)


def make_env(setting: Setting, number: int) -> Any:
    if setting.libero:
        return ChunkedLiberoEnv(setting)
    return GymWrapper(chunk_env(setting, number), categorical_action_encoding=True)


def make_envs(setting: Setting, process: int) -> Any:
    makers = [partial(make_env, setting, number) for number in range(process, setting.environments, PROCESSES)]
    return SerialEnv(len(makers), makers) if len(makers) > 1 else makers[0]()


class Rated:
    """A distribution that has rated the recorded action already."""

    has_rsample = False

    def __init__(self, logprobs: Tensor, entropy: Tensor) -> None:
        self._logprobs, self._entropy = logprobs, entropy

    def log_prob(self, action: Tensor) -> Tensor:
        return self._logprobs

    def entropy(self) -> Tensor:
        return self._entropy


class Actor(TensorDictModuleBase):
    """Acts; and for the loss, rates actions and states in one pass."""

    def __init__(self, network: Network, keys: list[Any]) -> None:
        super().__init__()
        self.network, self.in_keys, self.out_keys = network, keys, ["action", "action_log_prob"]

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        rows = data.reshape(-1)  # one environment has no dimension for it
        tokens, logprobs, _ = self.network.act(*(rows[key] for key in self.in_keys))
        data["action"], data["action_log_prob"] = tokens.view(*data.shape, -1), logprobs.view(data.shape)
        return data

    def get_dist(self, data: TensorDictBase) -> Rated:
        image, numbers = (data[key] for key in self.in_keys)
        logprobs, entropy, data["value_now"] = self.network.rate(image, numbers, data["action"])
        return Rated(logprobs, entropy)


class Critic(TensorDictModuleBase):
    """Rates states for the advantages, with any leading dimensions."""

    def __init__(self, network: Network, keys: list[Any]) -> None:
        super().__init__()
        self.network, self.in_keys, self.out_keys = network, keys, ["state_value"]

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        rows = data.reshape(-1)
        data["state_value"] = self.network.value(*(rows[key] for key in self.in_keys)).view(*data.shape, 1)
        return data


def main() -> None:
    setting = read_setting()
    algo, learner = setting.algo, setting.config.learner
    network, clock = Network(setting), Clock(setting, "torchrl")
    keys: list[Any] = [("observation", "image"), ("observation", "state")] if setting.libero else ["image", "numbers"]
    actor = Actor(network, keys)
    rated = TensorDictModule(lambda values: values[:, None], in_keys=["value_now"], out_keys=["state_value"])
    weights: dict[str, Any] = {"entropy_coeff": algo.entropy_coef, "critic_coeff": algo.value_coef}
    weights |= {"clip_epsilon": (algo.clip_low, algo.clip_high), "normalize_advantage": True}
    loss = ClipPPOLoss(actor, rated, functional=False, **weights)
    gae = GAE(gamma=algo.gamma, lmbda=algo.gae_lambda, value_network=Critic(network, keys), shifted=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learner.lr)
    makers = [partial(make_envs, setting, process) for process in range(PROCESSES)]
    collector = MultiSyncCollector(makers, actor, frames_per_batch=setting.chunks, cat_results="stack")
    torch.set_num_threads(PROCESSES)  # collectors wait while it learns
    for batch in collector:
        data = gae(batch).reshape(-1)
        for _ in range(algo.epochs):
            for rows in torch.randperm(len(data)).split(setting.minibatch):
                losses = loss(data[rows])
                optimizer.zero_grad()
                sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(network.parameters(), learner.max_grad_norm)
                optimizer.step()
        collector.update_policy_weights_()
        if not clock.goes_on():
            break
    clock.end()


if __name__ == "__main__":
    main()
