"""Checks that ManiSkill can run here, and makes its environments."""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from envs.base import EnvError
from envs.maniskill.config import ManiSkillConfig
from envs.maniskill.tasks import Task, select_tasks
from envs.maniskill.vulkan import vulkan_problem
from vla_rl.core.packages import install_command

_SOFTWARE = "pci:0"  # SAPIEN's name for a software renderer, which is on no bus


def check_maniskill(config: ManiSkillConfig) -> None:
    """Raise EnvError, with the remedy, if ``config`` cannot be simulated here: no package, Vulkan, GPU or assets.

    Imports ManiSkill only if a task needs its downloaded assets.
    """
    missing = [name for name in ("mani_skill", "sapien") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvError(f"ManiSkill is not installed (no package {missing[0]}): {install_command('maniskill')}")
    import sapien  # noqa: F401  if a container has no Vulkan loader or driver of its GPU, this sets SAPIEN's own

    problem = vulkan_problem()
    if problem:  # without Vulkan, not even scenes that are never drawn can be built
        raise EnvError(f"ManiSkill cannot run: {problem}")
    if config.backend == "physx_cuda" and not _cuda():
        raise EnvError(
            "env.backend=physx_cuda needs an NVIDIA GPU and a CUDA build of torch: set env.backend=physx_cpu"
        )
    for task in select_tasks(config):
        if task.assets:
            _check_assets(task)


def make(task: Task, config: ManiSkillConfig, backend: str, rows: int) -> Any:
    """ManiSkill's own environment: ``rows`` scenes (one on physx_cpu), with the camera's size and shader, no reward."""
    registration = import_maniskill()
    camera: dict[str, Any] = {"shader_pack": config.shader}
    if task.square:
        camera |= {"width": config.image_size, "height": config.image_size}
    with _devices(backend):
        return registration.make(
            task.uid,
            num_envs=rows,
            obs_mode=task.textures,
            reward_mode="none",
            control_mode=task.control,
            sensor_configs=camera,
        )


def import_maniskill() -> Any:
    """``mani_skill.utils.registration``, with all tasks registered and its warnings about robots silenced."""
    import mani_skill
    import mani_skill.envs
    from mani_skill.utils import registration

    mani_skill.logger.setLevel(logging.ERROR)
    return registration


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_assets(task: Task) -> None:
    """Raise EnvError if assets are missing: ManiSkill would ask a worker process on stdin whether to download them."""
    import_maniskill()
    from mani_skill.utils import assets

    missing = [name for name in task.assets if not assets.is_data_source_downloaded(name)]
    if missing:
        commands = " && ".join(f"python -m mani_skill.utils.download_asset -y {name}" for name in missing)
        raise EnvError(
            f"{task} needs ManiSkill's assets {', '.join(missing)}: {commands} (MS_ASSET_DIR is their folder)"
        )


def _drawing_device(sapien: Any, on_gpu: bool) -> tuple[Any, str]:
    """SAPIEN's device, and ManiSkill's name for its kind. A CUDA GPU may be there without a Vulkan driver to draw with.

    ``on_gpu``: only a CUDA GPU will do. Raises EnvError if no device can draw.
    """
    for alias, name in (("cuda", "sapien_cuda"), *([] if on_gpu else [(_SOFTWARE, "sapien_cpu")])):
        with contextlib.suppress(RuntimeError):  # there is no such device
            device = sapien.Device(alias)
            if device.can_render():
                return device, name
    what = "env.backend=physx_cuda draws on the CUDA GPU, which" if on_gpu else "ManiSkill has no device that"
    remedy = "install the GPU's Vulkan driver (in a container: NVIDIA_DRIVER_CAPABILITIES=all)"
    raise EnvError(f"{what} can{'not' if on_gpu else ''} draw: {remedy}" + ", or set env.backend=physx_cpu" * on_gpu)


@contextmanager
def _devices(backend: str) -> Iterator[None]:
    """Make ManiSkill simulate with ``backend``, and draw with a GPU or else in software.

    ManiSkill chooses devices by name, and has no name for a software renderer. Raises EnvError if none can draw.
    """
    import sapien
    import torch
    from mani_skill.envs import sapien_env
    from mani_skill.envs.utils.system.backend import BackendInfo

    on_gpu = backend == "physx_cuda"
    render, name = _drawing_device(sapien, on_gpu)
    chosen = BackendInfo(
        device=torch.device("cuda" if on_gpu else "cpu"),
        sim_device=sapien.Device("cuda" if on_gpu else "cpu"),
        sim_backend=backend,
        render_device=render,
        render_backend=name,
    )
    original = sapien_env.parse_sim_and_render_backend
    sapien_env.parse_sim_and_render_backend = lambda *_: chosen
    try:
        yield
    finally:
        sapien_env.parse_sim_and_render_backend = original
