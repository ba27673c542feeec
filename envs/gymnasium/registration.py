"""The ids under which gymnasium knows the simulators.

Importing this module registers them; ``vla_rl.register_envs()`` does, too.
"""

from collections.abc import Mapping
from typing import Any

from gymnasium.envs import registration  # not all of gymnasium, which may be in the middle of its own import

NAMESPACE = "vla_rl"
_HOME = "envs.as_gymnasium.env"
# id: the simulator's config, whose keys are arguments of gymnasium.make as well
IDS: Mapping[str, Mapping[str, Any]] = {
    "LiberoSpatial-v0": {"name": "libero", "suite": "libero_spatial", "tasks": ()},
    "LiberoObject-v0": {"name": "libero", "suite": "libero_object", "tasks": ()},
    "LiberoGoal-v0": {"name": "libero", "suite": "libero_goal", "tasks": ()},
    "Libero10-v0": {"name": "libero", "suite": "libero_10", "tasks": ()},
    "Libero90-v0": {"name": "libero", "suite": "libero_90", "tasks": ()},
    "ManiSkill-v0": {"name": "maniskill"},
    "MetaWorld-v0": {"name": "metaworld"},
    "Tabletop-v0": {"name": "tabletop"},
}


def register() -> None:
    """Make the ids known; safe to call twice."""
    for name, values in IDS.items():
        if f"{NAMESPACE}/{name}" not in registration.registry:
            registration.register(
                id=f"{NAMESPACE}/{name}",
                entry_point=f"{_HOME}:SimulatorGym",
                vector_entry_point=f"{_HOME}:SimulatorVectorGym",
                kwargs={"config": dict(values)},
            )


register()
