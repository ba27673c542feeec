"""Import LIBERO without questions on stdin, without output and without stray files.

By default, LIBERO asks on stdin for a data folder, robosuite logs to a fixed file in the system's temporary folder and
warns about private macros, MuJoCo logs into the working folder, and numba, matplotlib and the GL driver write below
HOME or into the installed packages. ``import_libero`` prevents all of this before the first import.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import types

import yaml

from envs.base import EnvError
from envs.base.mujoco_setup import import_mujoco, select_egl_device, select_gl_backend
from envs.base.packages import package_folder
from envs.libero.assets.resolve import AssetMode, LiberoAssets, cache_dir, resolve_assets
from vla_rl.core.files import replacing
from vla_rl.core.packages import install_command


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
    import_mujoco()
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
