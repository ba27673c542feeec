"""Import LIBERO without questions on stdin, without output and without stray files.

By default, LIBERO asks on stdin for a data folder, robosuite logs to a fixed file in the system's temporary folder and
warns about private macros, MuJoCo logs into the working folder, and numba, matplotlib and the GL driver write below
HOME or into the installed packages. ``import_libero`` prevents all of this before the first import.
"""

import ctypes
import ctypes.util
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import types
from pathlib import Path

import yaml

from envs.base import EnvError
from envs.base.packages import package_folder
from envs.libero.assets.resolve import AssetMode, LiberoAssets, cache_dir, resolve_assets
from vla_rl.core.files import replacing
from vla_rl.core.gpus import GpuReport
from vla_rl.core.packages import install_command

log = logging.getLogger(__name__)

GL_BACKENDS = ("egl", "osmesa")
_GL_REMEDY = {
    "osmesa": "install it (Debian, Ubuntu: apt-get install libosmesa6) or set MUJOCO_GL=egl",
    "egl": "install it (Debian, Ubuntu: apt-get install libegl1) or set MUJOCO_GL=osmesa",
}
_GL_LIBRARIES = {"osmesa": ("OSMesa", "libOSMesa.so.8", "libOSMesa.so.6"), "egl": ("EGL", "libEGL.so.1")}


def import_libero(assets: AssetMode = "auto") -> LiberoAssets:
    """Prepare this process for ``import libero.libero``, import it, and return the assets that it uses.

    Idempotent. A later call with another ``assets`` switches over: environments created *or reset* afterwards read the
    new folder, so close the old ones first.

    Sets these environment variables unless they are set: MUJOCO_GL (``egl`` if a GPU is present, else ``osmesa``),
    MUJOCO_EGL_DEVICE_ID (``select_egl_device``); and, below ``cache_dir()``, NUMBA_CACHE_DIR, MPLCONFIGDIR and the GL
    drivers' shader caches. LIBERO_CONFIG_PATH is always replaced: another configuration would redirect tasks and
    initial states.

    Raises EnvError, with the remedy, if LIBERO, robosuite, MuJoCo or the GL library is missing, if MUJOCO_GL names no
    usable backend, if the assets named by LIBERO_ASSETS do not exist, and if the cache folder cannot be written.
    """
    for package in ("mujoco", "robosuite", "libero"):
        if package_folder(package) is None:
            raise EnvError(f"Python package {package!r} is missing: {install_command('libero')}")
    if select_gl_backend() == "egl":
        select_egl_device()
    resolved = resolve_assets(assets)
    try:
        _redirect_caches()
        _write_config()
    except OSError as error:
        raise EnvError(f"{cache_dir()} cannot be written ({error}): set VLA_RL_CACHE to a writable folder") from error
    try:
        _import_robosuite()
        libero = importlib.import_module("libero.libero")
    except ImportError as error:
        raise EnvError(
            f"LIBERO cannot be imported ({error}; MUJOCO_GL={os.environ['MUJOCO_GL']}): "
            f"{install_command('libero')}; and see `vla-rl doctor` for the GL backend"
        ) from error
    vars(libero)["_assets_path_cache"] = str(resolved.path)  # the one place that all of LIBERO asks
    return resolved


def select_gl_backend() -> str:
    """Choose how MuJoCo renders off-screen, set MUJOCO_GL to it and return it.

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


def _redirect_caches() -> None:
    cache = cache_dir()
    folders = {
        "NUMBA_CACHE_DIR": cache / "numba",
        "MPLCONFIGDIR": cache / "matplotlib",
        "MESA_SHADER_CACHE_DIR": cache / "gl",
        "MESA_GLSL_CACHE_DIR": cache / "gl",  # the name of that variable before Mesa 22
        "__GL_SHADER_DISK_CACHE_PATH": cache / "gl",
    }
    for variable, folder in folders.items():
        if not os.environ.get(variable):
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(folder)
    if "numba" in sys.modules:  # it read its variables when it was imported
        importlib.import_module("numba").config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"]


def _write_config() -> None:
    """Write the file whose absence makes LIBERO ask for a data folder on stdin."""
    package = package_folder("libero")
    assert package is not None
    root = package / "libero"
    # Two installations may share one cache folder, and the configuration holds paths into one of them.
    folder = cache_dir() / "libero" / f"config-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"
    paths = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": cache_dir() / "libero" / "datasets",
        "assets": root / "assets",
    }
    text = yaml.safe_dump({key: str(path) for key, path in paths.items()})
    file = folder / "config.yaml"
    if not file.is_file() or file.read_text() != text:
        with replacing(file) as partial:
            partial.write_text(text)
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)


def _import_robosuite() -> None:
    """Import robosuite without its log file and its warning about private macros; MUJOCO_GL stays as it is.

    robosuite opens its log file and prints its warning while its package is being imported. So its settings module is
    loaded and changed first, together with an empty private one. It also asserts that the digits of
    MUJOCO_EGL_DEVICE_ID occur in the text of CUDA_VISIBLE_DEVICES, so it does not see the latter.
    """
    mujoco = importlib.import_module("mujoco")
    # Without a handler, MuJoCo appends warnings (say, an unstable simulation) to a file in the working folder.
    mujoco.set_mju_user_warning(lambda text: log.warning("MuJoCo: %s", text))
    if "robosuite" in sys.modules:
        return
    package = package_folder("robosuite")
    assert package is not None
    macros_spec = importlib.util.spec_from_file_location("robosuite.macros", package / "macros.py")
    assert macros_spec is not None
    assert macros_spec.loader is not None
    macros = importlib.util.module_from_spec(macros_spec)
    macros_spec.loader.exec_module(macros)
    vars(macros).update(FILE_LOGGING_LEVEL=None, MUJOCO_GPU_RENDERING=False)
    sys.modules["robosuite.macros"] = macros
    sys.modules.setdefault("robosuite.macros_private", types.ModuleType("robosuite.macros_private"))
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        robosuite = importlib.import_module("robosuite")
    except ImportError:
        for name in ("robosuite.macros", "robosuite.macros_private"):
            sys.modules.pop(name, None)
        raise
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    vars(robosuite)["macros"] = macros
