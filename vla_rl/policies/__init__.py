"""Vision-language-action policies behind one interface (``vla_rl.policies.base.policy``), one folder each.

A new policy takes its folder and its config in ``PolicyConfig``. The configs do not load torch.
``vla_rl.policies.build`` makes a policy from a run's config.
"""

from typing import Annotated

from pydantic import Field

from vla_rl.policies.gaussian.config import SmallGaussianConfig
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.remote.config import RemoteConfig

PolicyConfig = Annotated[
    OpenVLAOFTConfig | Pi0Config | LeRobotConfig | SmallGaussianConfig | RemoteConfig, Field(discriminator="name")
]
