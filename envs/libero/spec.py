"""What LIBERO offers under a configuration, found out without starting it."""

from __future__ import annotations

from envs.libero.assets.resolve import resolve_assets
from envs.libero.bootstrap import select_gl_backend
from envs.libero.config import LiberoConfig
from envs.libero.protocol.tasks import STEP_LIMITS, load_init_states, select_tasks
from vla_rl.core.records import EnvSpec

MAIN_CAMERA = "agentview"
WRIST_CAMERA = "robot0_eye_in_hand"


def libero_spec(config: LiberoConfig) -> EnvSpec:
    """The ``spec`` of the environment that ``config`` describes.

    Raises EnvError where LIBERO, its OpenGL library, the assets or a configured task is missing.
    """
    tasks = select_tasks(config.suite, config.tasks)
    select_gl_backend()
    return EnvSpec(
        name="libero",
        views=(MAIN_CAMERA, WRIST_CAMERA) if config.wrist_camera else (MAIN_CAMERA,),
        image_size=config.image_size,
        proprio_dim=8 if config.proprio else 0,
        action_dim=7,
        max_episode_steps=config.max_episode_steps or STEP_LIMITS[config.suite],
        instructions=tuple(task.instruction for task in tasks),
        init_states=min(len(load_init_states(task)) for task in tasks),
        assets=resolve_assets(config.assets).origin,
    )
