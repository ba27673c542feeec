"""Finds LIBERO's meshes and textures.

LIBERO's package ships tasks and initial states but no assets. ``resolve_assets`` looks for them in this order:

1. the folder named by the environment variable ``LIBERO_ASSETS``;
2. an ``assets`` folder inside the installed package;
3. the caches of the model hub's client, of LIBERO's own download code, and of this module;
4. a download from the hub, given up within seconds if the hub cannot be reached;
5. placeholder assets, generated from a table (see ``placeholder``).

This module writes only below ``cache_dir()``.
"""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envs.base import EnvError
from envs.base.packages import package_folder
from envs.libero.assets import placeholder

log = logging.getLogger(__name__)

AssetMode = Literal["auto", "placeholder"]

HUB_REPO = "lerobot/libero-assets"  # a data set repository: the name LIBERO's own download code uses
HUB_ANSWER_SECONDS = 8.0  # for the client to start and the hub to answer
HUB_DOWNLOAD_SECONDS = 1800.0
HUB_RETRY_SECONDS = 600.0  # a failed attempt is remembered this long, so that not every worker repeats it

_DOWNLOAD_SCRIPT = """
import sys
from huggingface_hub import HfApi, snapshot_download
HfApi().dataset_info(sys.argv[1], timeout=5.0)
print("answered", flush=True)
snapshot_download(sys.argv[1], repo_type="dataset", local_dir=sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class LiberoAssets:
    """A complete asset folder."""

    path: Path
    origin: str  # "LIBERO_ASSETS", "package", "hub cache", "hub download" or "placeholder"


def cache_dir() -> Path:
    """The only folder that this project writes to unasked: ``VLA_RL_CACHE``, by default ``~/.cache/vla_rl``."""
    return Path(os.environ.get("VLA_RL_CACHE") or "~/.cache/vla_rl").expanduser().absolute()


def resolve_assets(mode: AssetMode = "auto") -> LiberoAssets:
    """Find, download or generate an asset folder, in the order given above.

    Raises EnvError if ``LIBERO_ASSETS`` is set and names no asset folder, if ``mode`` is unknown, and if the cache
    folder cannot be written.
    """
    if mode not in ("auto", "placeholder"):
        raise EnvError(f"assets={mode!r} is unknown: use 'auto' or 'placeholder'")
    if mode == "auto":
        found = _named_assets() or _package_assets() or _cached_assets() or _downloaded_assets()
        if found is not None:
            return found
    try:
        return LiberoAssets(placeholder.ensure_placeholder_assets(cache_dir() / "libero"), "placeholder")
    except OSError as error:
        raise EnvError(
            f"LIBERO's placeholder assets cannot be written to {cache_dir()} ({error}): "
            "set VLA_RL_CACHE to a folder that can be written"
        ) from error


def missing_files(folder: Path) -> list[str]:
    """The files that a folder lacks to serve all 130 tasks, relative to it; empty if it is complete."""
    return [name for name in placeholder.required_files() if not (folder / name).is_file()]


def _named_assets() -> LiberoAssets | None:
    named = os.environ.get("LIBERO_ASSETS")
    if not named:
        return None
    folder = Path(named).expanduser().absolute()
    remedy = "point it to a folder with LIBERO's 'scenes', 'textures' and 'articulated_objects', or unset it"
    if not folder.is_dir():
        raise EnvError(f"LIBERO_ASSETS={named} is not a folder: {remedy}")
    missing = missing_files(folder)
    if missing:
        more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        raise EnvError(f"LIBERO_ASSETS={named} is an incomplete asset folder: it lacks {missing[0]}{more}; {remedy}")
    return LiberoAssets(folder, "LIBERO_ASSETS")


def _package_assets() -> LiberoAssets | None:
    package = package_folder("libero")
    folder = package and package / "libero" / "assets"
    return LiberoAssets(folder, "package") if folder and _complete(folder) else None


def _cached_assets() -> LiberoAssets | None:
    for folder in (*_hub_snapshots(), Path("~/.cache/libero/assets").expanduser(), _download_folder()):
        if _complete(folder):
            return LiberoAssets(folder, "hub cache")
    return None


def _hub_snapshots() -> Iterator[Path]:
    """Snapshots in the hub client's cache, that of the main branch first."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    repository = Path(cache).expanduser() / f"datasets--{HUB_REPO.replace('/', '--')}"
    main = repository / "refs" / "main"
    if main.is_file():
        yield repository / "snapshots" / main.read_text().strip()
    if (repository / "snapshots").is_dir():
        yield from sorted((repository / "snapshots").iterdir())


def _complete(folder: Path) -> bool:
    return folder.is_dir() and not missing_files(folder)


def _download_folder() -> Path:
    return cache_dir() / "libero" / "hub-assets"


def _downloaded_assets() -> LiberoAssets | None:
    """Download once per machine, in the first process that asks; None if the hub cannot be reached."""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline or package_folder("huggingface_hub") is None:
        return None
    target = _download_folder()
    failed = target.with_name("hub-failed")
    try:
        with _locked(target.with_name("hub-assets.lock")):
            if not _complete(target):
                if failed.exists() and time.time() - failed.stat().st_mtime < HUB_RETRY_SECONDS:
                    return None
                partial = target.with_name("hub-assets.partial")
                problem = _download(partial)
                if problem is not None:
                    log.info("LIBERO assets not downloaded (%s), asked again in %d s", problem, HUB_RETRY_SECONDS)
                    failed.touch()
                    return None
                partial.rename(target)
    except OSError as error:
        log.warning("LIBERO assets cannot be kept in %s: %s", target.parent, error)
        return None
    return LiberoAssets(target, "hub download")


def _download(partial: Path) -> str | None:
    """Fetch the repository into ``partial``, in a process that can be stopped; returns what went wrong.

    The next download continues what an interrupted one leaves in ``partial``.
    """
    state = cache_dir() / "hub"
    environment = os.environ | {"HF_HOME": str(state), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _DOWNLOAD_SCRIPT, HUB_REPO, str(partial)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    # A silent name server blocks the client for longer than its own timeouts, so it is stopped from outside.
    impatience = threading.Timer(HUB_ANSWER_SECONDS, process.kill)
    impatience.start()
    answered = process.stdout.readline().strip() == "answered"
    impatience.cancel()
    try:
        if answered:
            log.warning("Downloading LIBERO's assets (%s) into %s", HUB_REPO, partial.parent)
        status = process.wait(HUB_DOWNLOAD_SECONDS if answered else HUB_ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not finished after {HUB_DOWNLOAD_SECONDS:.0f} s"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if not answered:
        return "the hub does not answer"
    if status != 0:
        return f"the download ended with status {status}"
    missing = missing_files(partial)
    return f"the hub's copy lacks {missing[0]}" if missing else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; a killed holder releases it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that is looking for LIBERO's assets on the hub")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
