"""How MuJoCo draws is chosen before it is imported."""

from __future__ import annotations

import os

import pytest

from envs.base import EnvError, mujoco_setup
from vla_rl.core.gpus import Gpu, GpuReport


def test_gl_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"egl": True, "osmesa": True}
    monkeypatch.setattr(mujoco_setup, "_gl_library_found", lambda name: found[name])
    monkeypatch.setattr(mujoco_setup, "gpu_present", lambda: True)
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delenv("PYOPENGL_PLATFORM", raising=False)
    assert mujoco_setup.select_gl_backend() == os.environ["MUJOCO_GL"] == "egl"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert mujoco_setup.select_gl_backend() == "osmesa"
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    with pytest.raises(EnvError, match="PYOPENGL_PLATFORM=egl contradicts MUJOCO_GL=osmesa"):
        mujoco_setup.select_gl_backend()
    monkeypatch.delenv("PYOPENGL_PLATFORM")
    found["osmesa"] = False
    with pytest.raises(EnvError, match="MUJOCO_GL=osmesa is missing: install it"):
        mujoco_setup.select_gl_backend()
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(mujoco_setup, "gpu_present", lambda: False)
    assert mujoco_setup.select_gl_backend() == "egl"  # software rendering through EGL
    found["egl"] = False
    monkeypatch.setenv("MUJOCO_GL", "")
    with pytest.raises(EnvError, match="apt-get install libosmesa6"):
        mujoco_setup.select_gl_backend()
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    with pytest.raises(EnvError, match="MUJOCO_GL=disabled cannot render"):
        mujoco_setup.select_gl_backend()


def test_software_draws_without_threads_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Mesa, such a thread writes into a fence that may have been freed."""
    monkeypatch.setattr(mujoco_setup, "_gl_library_found", lambda name: True)
    monkeypatch.setenv("MUJOCO_GL", "")  # what is chosen is for this test alone
    monkeypatch.setenv("LP_NUM_THREADS", "")
    monkeypatch.delenv("LP_NUM_THREADS")
    mujoco_setup.select_gl_backend()
    assert os.environ["LP_NUM_THREADS"] == "0"
    monkeypatch.setenv("LP_NUM_THREADS", "3")
    mujoco_setup.select_gl_backend()
    assert os.environ["LP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("visible", "numbers", "chosen"),
    [(None, (), None), (None, (0, 1), "0"), ("5,2", (5, 2), "5"), ("GPU-aaaa", (3,), "3"), ("", (), "0")],
)
def test_egl_draws_on_the_first_visible_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, numbers: tuple[int, ...], chosen: str | None
) -> None:
    gpus = tuple(Gpu("any", 1, str(number), number) for number in numbers)
    monkeypatch.setattr(mujoco_setup.GpuReport, "detect", lambda: GpuReport(gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "")
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID")
    mujoco_setup.select_egl_device()
    assert os.environ.get("MUJOCO_EGL_DEVICE_ID") == chosen
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "7")
    mujoco_setup.select_egl_device()
    assert os.environ["MUJOCO_EGL_DEVICE_ID"] == "7"
