"""Prepares a process for MuJoCo: how it draws off-screen, and where its warnings go. For all simulators built on it."""

import ctypes
import ctypes.util
import importlib
import logging
import os
import threading
from pathlib import Path
from typing import Any

from envs.base.vector_env import EnvError
from vla_rl.core.gpus import GpuReport

log = logging.getLogger(__name__)
_of_thread = threading.local()

GL_BACKENDS = ("egl", "osmesa")
_GL_REMEDY = {
    "osmesa": "install it (Debian, Ubuntu: apt-get install libosmesa6) or set MUJOCO_GL=egl",
    "egl": "install it (Debian, Ubuntu: apt-get install libegl1) or set MUJOCO_GL=osmesa",
}
# Threads of Mesa's llvmpipe beside the one that draws. With any, Mesa may free a fence that such a thread is still
# unlocking (``lp_fence_signalled`` reads without the lock). Two busy env workers died of it three times in 44 minutes.
_DRAWING_THREADS = "0"
_GL_LIBRARIES = {"osmesa": ("OSMesa", "libOSMesa.so.8", "libOSMesa.so.6"), "egl": ("EGL", "libEGL.so.1")}


def import_mujoco() -> Any:
    """The module ``mujoco``, imported after MUJOCO_GL and MUJOCO_EGL_DEVICE_ID are set, with its warnings in our log.

    Without a handler, MuJoCo appends warnings (say, an unstable simulation) to a file in the working folder.
    Raises EnvError as ``select_gl_backend`` does.
    """
    if select_gl_backend() == "egl":
        select_egl_device()
    mujoco = importlib.import_module("mujoco")
    mujoco.set_mju_user_warning(lambda text: log.warning("MuJoCo: %s", text))
    return mujoco


def gl_context() -> Any:
    """The thread's GL context, for all models that are drawn in it: only one thread at a time can use a context.

    Its kind is what MUJOCO_GL names now; ``mujoco.GLContext`` has the kind that it named when MuJoCo was imported.
    Raises EnvError if it cannot be created.
    """
    if not hasattr(_of_thread, "gl_context"):
        try:
            kind = importlib.import_module(f"mujoco.{select_gl_backend()}")
            _of_thread.gl_context = kind.GLContext(64, 64)  # MuJoCo renders into buffers of its own
        except (RuntimeError, ImportError) as error:
            raise EnvError(
                f"no off-screen GL context could be created ({error}): see `vla-rl doctor` for the GL backend"
            ) from error
        # Keep it until the process ends: its finalizer would run after the OpenGL bindings are unloaded, and complain.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_of_thread.gl_context))
    return _of_thread.gl_context


def select_gl_backend() -> str:
    """Choose how MuJoCo renders off-screen, set MUJOCO_GL to it and return it. Software draws in the calling thread.

    Raises EnvError if MUJOCO_GL or PYOPENGL_PLATFORM names no usable backend, or its library is missing.
    """
    named = os.environ.get("MUJOCO_GL", "").lower().strip()
    platform = os.environ.get("PYOPENGL_PLATFORM", "").lower().strip()
    if named and named not in GL_BACKENDS:
        raise EnvError(f"MUJOCO_GL={named} cannot render off-screen: unset it, or use {' or '.join(GL_BACKENDS)}")
    if not named and platform in ("egl", "osmesa"):
        named = platform
    if platform in ("egl", "osmesa") and named != platform:
        raise EnvError(f"PYOPENGL_PLATFORM={platform} contradicts MUJOCO_GL={named}: unset PYOPENGL_PLATFORM")
    if not named:
        named = _detect_gl_backend()
    if not _gl_library_found(named):
        raise EnvError(f"the GL library of MUJOCO_GL={named} is missing: {_GL_REMEDY[named]}")
    os.environ["MUJOCO_GL"] = named
    os.environ.setdefault("LP_NUM_THREADS", _DRAWING_THREADS)
    return named


def select_egl_device() -> None:
    """Set MUJOCO_EGL_DEVICE_ID to EGL's number of the first GPU that CUDA_VISIBLE_DEVICES shows, unless it is set.

    EGL counts all GPUs. robosuite would take the text of CUDA_VISIBLE_DEVICES for EGL's number, and fail if that is
    empty or a UUID.
    """
    if os.environ.get("MUJOCO_EGL_DEVICE_ID"):
        return
    gpus = GpuReport.detect().gpus
    if gpus or "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ["MUJOCO_EGL_DEVICE_ID"] = str(gpus[0].number if gpus else 0)


def gpu_present() -> bool:
    """Whether a GPU with an EGL driver is visible to this process."""
    nvidia = Path("/dev/nvidiactl").exists() and _loads("libEGL_nvidia.so.0")
    return nvidia or any(os.access(node, os.R_OK | os.W_OK) for node in Path("/dev/dri").glob("renderD*"))


def _detect_gl_backend() -> str:
    if gpu_present() and _gl_library_found("egl"):
        return "egl"
    if _gl_library_found("osmesa"):
        return "osmesa"
    if _gl_library_found("egl"):  # recent Mesa releases have no OSMesa, but render in software through EGL
        return "egl"
    raise EnvError(
        "no off-screen GL library found: install one (Debian, Ubuntu: apt-get install libosmesa6, "
        "or libegl1 on a machine with a GPU)"
    )


def _gl_library_found(backend: str) -> bool:
    short_name, *sonames = _GL_LIBRARIES[backend]
    return ctypes.util.find_library(short_name) is not None or any(_loads(name) for name in sonames)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
