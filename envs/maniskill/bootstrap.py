"""What has to be there before ManiSkill is imported, and how one of its environments is made."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from envs.base import EnvError
from envs.maniskill.config import ManiSkillConfig
from envs.maniskill.tasks import Task, select_tasks
from envs.maniskill.vulkan import vulkan_problem

INSTALL = 'bash scripts/setup.sh, or pip install "vla_rl[maniskill]"'
_SOFTWARE = "pci:0"  # how SAPIEN finds a software renderer, which lies on no bus


def check_maniskill(config: ManiSkillConfig) -> None:
    """Raise EnvError, naming the remedy, where ``config`` cannot be simulated here: no package, Vulkan, GPU or assets.

    Imports ManiSkill only where its downloaded assets have to be looked for.
    """
    missing = [name for name in ("mani_skill", "sapien") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvError(f"ManiSkill is not installed (no package {missing[0]}): {INSTALL}")
    import sapien  # noqa: F401  where a container announces no loader or driver of its GPU, this names SAPIEN's own

    problem = vulkan_problem()
    if problem:  # without one even scenes that nobody looks at cannot be built
        raise EnvError(f"ManiSkill cannot run: {problem}")
    if config.backend == "physx_cuda" and not _cuda():
        raise EnvError(
            "env.backend=physx_cuda needs an NVIDIA GPU and a CUDA build of torch: set env.backend=physx_cpu"
        )
    for task in select_tasks(config):
        if task.assets:
            _check_assets(task)


def choose_backend(config: ManiSkillConfig) -> str:
    """physx_cpu or physx_cuda."""
    if config.backend == "auto":
        return "physx_cuda" if config.wants_gpu and _cuda() else "physx_cpu"
    return config.backend


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
    """ManiSkill asks on standard input whether to download what it misses; nobody would answer a worker process."""
    import_maniskill()
    from mani_skill.utils import assets

    missing = [name for name in task.assets if not assets.is_data_source_downloaded(name)]
    if missing:
        commands = " && ".join(f"python -m mani_skill.utils.download_asset -y {name}" for name in missing)
        raise EnvError(
            f"{task} needs ManiSkill's assets {', '.join(missing)}: {commands} (MS_ASSET_DIR says where they lie)"
        )


@contextmanager
def _devices(backend: str) -> Iterator[None]:
    """Let the environments made here use ``backend``, and whatever device there is to draw with.

    ManiSkill chooses devices by names, and has none for a software renderer.
    """
    import sapien
    import torch
    from mani_skill.envs import sapien_env
    from mani_skill.envs.utils.system.backend import BackendInfo

    on_gpu = backend == "physx_cuda"
    try:
        render, name = sapien.Device("cuda"), "sapien_cuda"
    except RuntimeError:
        render, name = sapien.Device(_SOFTWARE), "sapien_cpu"
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
