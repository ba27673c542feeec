"""Reinforcement-learning algorithms, one per file.

A file holds an algorithm's configuration keys and its class. A new algorithm takes its file and its name in
``ALGORITHMS``; other packages bring theirs (``vla_rl.core.plugins``). The files do not load torch when they are
imported, because every process reads the configuration.
"""

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from algos.algorithm import Algorithm
from algos.awr import AWR
from algos.best_of_n import BestOfN
from algos.config import AlgoConfigBase
from algos.dagger import DAgger
from algos.dsrl import DSRL
from algos.grpo import GRPO
from algos.iql import IQL
from algos.off_policy import OffPolicyAlgorithm
from algos.ppo import PPO
from algos.recap import RECAP
from algos.rft import RFT
from algos.rloo import RLOO
from algos.rlpd import RLPD
from algos.sac import SAC
from algos.td3_bc import TD3BC
from vla_rl.core.plugins import plugin_of

AnyAlgorithm = Algorithm | OffPolicyAlgorithm  # on super-batches, or on a replay memory

ALGORITHMS: tuple[type[AnyAlgorithm], ...] = (
    PPO,
    GRPO,
    RLOO,
    AWR,
    RFT,
    RECAP,
    IQL,
    TD3BC,
    SAC,
    RLPD,
    DSRL,
    BestOfN,
    DAgger,
)

if TYPE_CHECKING:
    AlgoConfig = AlgoConfigBase
else:  # the schema's union: the key ``name`` says which
    AlgoConfig = Annotated[Union[tuple(a.Config for a in ALGORITHMS)], Field(discriminator="name")]  # noqa: UP007


def make_algorithm(config: AlgoConfigBase) -> AnyAlgorithm:
    """The algorithm of a configuration."""
    found = plugin_of(config) or next(algorithm for algorithm in ALGORITHMS if algorithm.Config is type(config))
    own: Any = found
    algorithm: AnyAlgorithm = own(config)
    return algorithm


def trains_value_head(config: AlgoConfigBase) -> bool:
    """Whether the values that the policy states mean something after training with this algorithm."""
    algorithm = make_algorithm(config)
    return isinstance(algorithm, Algorithm) and type(algorithm).value_loss is not Algorithm.value_loss
