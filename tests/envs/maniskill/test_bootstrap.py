"""What ManiSkill needs, reported before anything starts; parts that need no simulator."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from envs import env_spec, make_env
from envs.base import EnvError
from envs.maniskill import bootstrap, vulkan
from envs.maniskill.config import ManiSkillConfig
from envs.maniskill.env import _Instance, _progress
from envs.maniskill.simulation import Simulation, rotation_vector
from envs.maniskill.tasks import TASKS, maniskill_spec
from envs.maniskill.vulkan import VulkanDevice, vulkan_problem
from vla_rl.config.run_config import RunConfig
from vla_rl.core.records import EpisodeSpec
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources

NEW, OLD = (
    VulkanDevice("llvmpipe", True, "Mesa 25.0.7-2~bpo12+1 (LLVM 15)"),
    VulkanDevice("llvmpipe", True, "Mesa 22.3.6"),
)
GPU = VulkanDevice("NVIDIA H200", False, "550.54")


@pytest.mark.maniskill
def test_without_a_vulkan_driver_nothing_starts_and_the_package_is_named() -> None:
    code = "from envs import env_spec; from envs.maniskill.config import ManiSkillConfig; env_spec(ManiSkillConfig())"
    nowhere = {"VK_DRIVER_FILES": os.devnull, "VK_ICD_FILENAMES": os.devnull}
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | nowhere, capture_output=True, text=True)
    assert run.returncode == 1
    assert "EnvError: ManiSkill cannot run: no Vulkan device" in run.stderr
    assert "mesa-vulkan-drivers 23.1 or newer" in run.stderr
    assert "bookworm-backports" in run.stderr


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (None, r"no Vulkan loader \(libvulkan.so.1\): install mesa-vulkan-drivers"),
        ([], r"found: none\): install mesa-vulkan-drivers"),
        ([OLD], r"found: llvmpipe, Mesa 22.3.6\): install mesa-vulkan-drivers 23.1 or newer"),
    ],
)
def test_each_lack_of_vulkan_has_its_remedy(
    monkeypatch: pytest.MonkeyPatch, devices: list[VulkanDevice] | None, text: str
) -> None:
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(vulkan, "vulkan_devices", lambda: devices)
    with pytest.raises(EnvError, match=text):
        env_spec(ManiSkillConfig())
    with pytest.raises(EnvError, match=text):
        make_env(ManiSkillConfig(), 1)


@pytest.mark.parametrize("devices", [[NEW], [OLD, GPU], [GPU]])
def test_one_usable_device_is_enough(monkeypatch: pytest.MonkeyPatch, devices: list[VulkanDevice]) -> None:
    monkeypatch.setattr(vulkan, "vulkan_devices", lambda: devices)
    assert vulkan_problem() == ""


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvError, match=r"no package mani_skill\): bash scripts/setup\.sh"):
        env_spec(ManiSkillConfig())


@pytest.mark.maniskill
def test_missing_assets_name_the_command_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from mani_skill.utils import assets

    monkeypatch.setattr(assets, "is_data_source_downloaded", lambda name: name == "widowx250s")
    config = ManiSkillConfig(tasks=("PutCarrotOnPlateInScene-v1",))
    with pytest.raises(EnvError, match=r"bridge_v2_real2sim: python -m mani_skill.utils.download_asset -y bridge_v2"):
        env_spec(config)
    with pytest.raises(EnvError, match="PutCarrotOnPlateInScene-v1 needs ManiSkill's assets bridge_v2_real2sim"):
        make_env(config, 2)


@pytest.mark.maniskill
def test_instructions_and_limits_are_those_of_the_package() -> None:
    registered = bootstrap.import_maniskill().REGISTERED_ENVS
    for uid, task in TASKS.items():
        assert registered[uid].max_episode_steps == task.steps
        assert set(registered[uid].asset_download_ids) <= set(task.assets)
        told = getattr(registered[uid].cls, "get_language_instruction", None)
        if told:
            assert told(type("Any", (), {"num_envs": 1})) == [task.instruction]


def test_the_spec_follows_the_configuration() -> None:
    spec = maniskill_spec(ManiSkillConfig(tasks=("PickCube-v1", "PutEggplantInBasketScene-v1"), image_size=96))
    assert (spec.image_size, spec.max_episode_steps, spec.assets) == (96, 120, "downloaded")
    assert spec.instructions == tuple(TASKS[n].instruction for n in ("PickCube-v1", "PutEggplantInBasketScene-v1"))
    blind = maniskill_spec(ManiSkillConfig(proprio=False, max_episode_steps=33))
    assert (blind.proprio_dim, blind.max_episode_steps, blind.assets) == (0, 33, "package")


@pytest.mark.parametrize("tasks", [("PushCube-v1", "PickCube-v1"), ("PutCarrotOnPlateInScene-v1",)])
def test_the_gpu_simulates_one_task_whose_environments_reset_one_by_one(tasks: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="simulates one of PushCube-v1"):
        ManiSkillConfig(backend="physx_cuda", tasks=tasks)  # type: ignore[arg-type]


def test_on_gpus_it_takes_devices_and_all_environments_are_one_split() -> None:
    config = RunConfig(env=ManiSkillConfig(backend="physx_cuda"))
    one_gpu, no_gpu = Resources(8, 1, "cuda"), Resources(8, 8, "cpu")
    on_gpu, on_cpu = make_plan(config, one_gpu), make_plan(config, no_gpu)
    assert (on_gpu.splits, on_cpu.splits) == (1, config.placement.envs_per_worker)
    assert [(p.kind, p.devices, p.lock) for p in on_gpu.workers] == [("cuda", (0,), "device 0")]
    assert all(p.devices == () and p.lock is None for p in on_cpu.workers)
    split = make_plan(config, Resources(8, 3, "cuda"))
    assert split.layout.describe() == "pipelined 1+1+1"
    drawn = make_plan(RunConfig(env=ManiSkillConfig()), one_gpu)
    assert all(p.devices == () for p in drawn.workers), "by itself it simulates on cores"


class _Sapien:
    """Devices by alias, and whether they can draw."""

    def __init__(self, **can_render: bool) -> None:
        self._can_render = can_render

    def Device(self, alias: str) -> SimpleNamespace:
        if (name := alias.split(":")[0]) not in self._can_render:
            raise RuntimeError(f"no device {alias}")
        return SimpleNamespace(alias=alias, can_render=lambda: self._can_render[name])


@pytest.mark.parametrize(
    ("devices", "on_gpu", "expected"),
    [
        ({"cuda": True, "pci": True}, False, "cuda"),
        ({"cuda": False, "pci": True}, False, "pci:0"),
        ({"pci": True}, False, "pci:0"),
        ({"cuda": True, "pci": True}, True, "cuda"),
    ],
)
def test_it_draws_with_a_device_that_can(devices: dict[str, bool], on_gpu: bool, expected: str) -> None:
    device, name = bootstrap._drawing_device(_Sapien(**devices), on_gpu)
    assert device.alias == expected
    assert name == ("sapien_cuda" if expected == "cuda" else "sapien_cpu")


def test_without_one_the_remedy_is_named() -> None:
    with pytest.raises(EnvError, match=r"on the CUDA GPU, which cannot draw: .*or set env\.backend=physx_cpu"):
        bootstrap._drawing_device(_Sapien(cuda=False, pci=True), True)
    with pytest.raises(EnvError, match="ManiSkill has no device that can draw: install the GPU's Vulkan driver"):
        bootstrap._drawing_device(_Sapien(cuda=False, pci=False), False)


class _Batch:
    """Three rows that count what they are told, as ManiSkill's batched environment would."""

    device = "cpu"

    def __init__(self) -> None:
        import torch

        self.place = torch.zeros(3, 2)
        self.told: list[np.ndarray] = []

    def step(self, action: np.ndarray) -> tuple[object, ...]:
        import torch

        self.told.append(action.copy())
        self.place += 1 + torch.from_numpy(action[:, :1])
        return None, None, None, None, {"success": self.place[:, 0] > 2.5}

    def get_state_dict(self) -> dict[str, object]:
        return {"actors": {"cube": self.place.clone()}}

    def set_state_dict(self, state: dict, index: object) -> None:
        self.place[index] = state["actors"]["cube"]


def test_rows_that_are_not_stepped_are_held_and_put_back() -> None:
    simulation = Simulation.__new__(Simulation)
    simulation.rows, simulation.env, simulation._fingers = 3, _Batch(), np.ones(3, np.float32)
    simulation.task = TASKS["PushCube-v1"]
    command = np.array([[1, 0, 0, 0, 0, 0, -1]], np.float32)
    assert simulation.step([1], command).tolist() == [False]
    assert simulation.env.place[:, 0].tolist() == [0, 2, 0]
    assert simulation.step([2, 1], command.repeat(2, axis=0)).tolist() == [False, True]
    assert simulation.env.place[:, 0].tolist() == [0, 4, 2]
    assert simulation.env.told[0][:, 0].tolist() == [0, 1, 0]
    assert simulation.env.told[1][:, 6].tolist() == [1, -1, -1]  # a held hand keeps its grip


class _Scene:
    """A carrot and a plate apart, judged by ManiSkill's own evaluation of its Bridge scenes; whether the carrot is held
    is told beforehand."""

    device = "cpu"
    _STATS = ("is_src_obj_grasped", "consecutive_grasp")

    def __init__(self, held: list[bool]) -> None:
        self._held = [False, *held]

    def reset(self, seed: list[int], options: dict[str, object]) -> tuple[object, object]:
        import torch

        carrot, plate = (
            SimpleNamespace(name=name, pose=SimpleNamespace(p=torch.tensor([[x, 0.0, 1.0]])))
            for name, x in (("carrot", 0.0), ("plate", 1.0))
        )
        self._state = SimpleNamespace(
            objs={"carrot": carrot, "plate": plate},
            source_obj_name="carrot",
            target_obj_name="plate",
            episode_source_obj_xyz_after_settle=carrot.pose.p,
            episode_obj_xyzs_after_settle={"carrot": carrot.pose.p, "plate": plate.pose.p},
            episode_source_obj_bbox_world=torch.full((3,), 0.1),
            episode_target_obj_bbox_world=torch.full((3,), 0.1),
            consecutive_grasp=torch.zeros(1, dtype=torch.int32),
            episode_stats={name: torch.zeros(1, dtype=torch.bool) for name in self._STATS},
            agent=SimpleNamespace(is_grasping=lambda thing: torch.tensor([self._held.pop(0)])),
            scene=SimpleNamespace(get_pairwise_contact_forces=lambda *things: torch.zeros(1, 3)),
        )
        return None, self._report()

    def step(self, action: np.ndarray) -> tuple[object, ...]:
        return None, None, None, None, self._report()

    def _report(self) -> dict[str, object]:
        from mani_skill.envs.tasks.digital_twins.bridge_dataset_eval.base_env import BaseBridgeEnv

        return BaseBridgeEnv._evaluate(self._state)


@pytest.mark.maniskill
def test_in_bridge_scenes_a_grasp_is_half_the_way_and_a_held_one_all_of_it() -> None:
    """RL4VLA's reward is 0.2 times what this potential gains, and success."""
    bootstrap.import_maniskill()
    held = [False, True, False, True, True, True, True, True, False]
    simulation = Simulation.__new__(Simulation)
    simulation.task, simulation.rows = TASKS["PutCarrotOnPlateInScene-v1"], 1
    simulation._fingers, simulation._reached = np.ones(1, np.float32), np.ones(1, np.float32)
    simulation.env = _Scene(held)
    instance = _Instance(EpisodeSpec(0, 0, 0), simulation, 0)
    simulation.reset(0, 0, None)
    reached = [_progress(instance)]
    for _ in held:
        simulation.step([0], np.zeros((1, 7), np.float32))
        reached.append(_progress(instance))
        assert _progress(instance) == reached[-1], "asking changes nothing"
    assert reached == [0, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1]


def test_every_task_has_a_way_to_its_goal() -> None:
    assert all(bool(task.things) != bool(task.milestones) for task in TASKS.values())


@pytest.mark.parametrize("angle", [0.0, 1e-12, 0.5, 3.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_rotation_vectors(angle: float, sign: int) -> None:
    axis = np.array([0.6, 0.0, -0.8])
    quaternion = sign * np.array([np.cos(angle / 2), *(np.sin(angle / 2) * axis)])
    np.testing.assert_allclose(rotation_vector(quaternion), angle * axis, atol=1e-9)
