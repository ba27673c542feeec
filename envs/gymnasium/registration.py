"""The ids under which gymnasium knows the simulators.

The entry point ``gymnasium.envs`` of the installed package calls ``register`` when gymnasium is imported. In a checkout
that is not installed, ``gymnasium.make("envs.gymnasium.registration:vla_rl/Tabletop-v0")`` does.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium

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
    "Tabletop-v0": {"name": "tabletop"},
}


def register() -> None:
    """Make the ids known; safe to call twice."""
    for name, values in IDS.items():
        if f"{NAMESPACE}/{name}" not in gymnasium.registry:
            gymnasium.register(
                id=f"{NAMESPACE}/{name}",
                entry_point=f"{_HOME}:SimulatorGym",
                vector_entry_point=f"{_HOME}:SimulatorVectorGym",
                kwargs={"config": dict(values)},
            )


def register_in_namespace() -> None:
    """As gymnasium calls it: within the namespace of the entry point's name."""
    register()


register()
