"""Processes that have imported what a run's processes need, and become these by a fork.

    driver ──start──▶ server "base" ─┬─ fork ─▶ server "policy" (torch, transformers, DeepSpeed)
                                     └─ fork ─▶ server "simulator"
    Ray ──▶ fork_request.py ──socket──▶ a server ── fork ──▶ Ray's worker

Else each of a run's processes imports for seconds, and on few cores they do so one after the other. The servers live as
long as the driver, for all of its runs. Where one cannot help, Ray starts a worker as it always does. A worker imports
Ray itself, whose library reads a worker's variables when it is loaded.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vla_rl.cluster.fork_request import FOLDER, socket_of
from vla_rl.cluster.held_folder import HeldFolder, session_root
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import CODE, Machine
from vla_rl.core.plugins import plugin_of
from vla_rl.policies.build import policy_modules

BASE, POLICY, SIMULATOR = "base", "policy", "simulator"
_KINDS = (BASE, POLICY, SIMULATOR)
_BACKLOG = 128
_RAY_NEEDS = (  # a worker's first lines import these, too; where the parent has not, each worker takes 7 MiB more
    *("asyncio", "click", "concurrent.futures.thread", "faulthandler", "filelock", "google.protobuf.internal.builder"),
    *("google.protobuf.json_format", "google.protobuf.runtime_version", "google.protobuf.timestamp_pb2", "jsonschema"),
    *("logging.config", "msgpack", "multiprocessing.context", "numpy", "packaging.version", "pdb", "psutil"),
    *("pyarrow.json", "requests", "shlex", "tarfile", "tqdm.auto", "tracemalloc", "wcwidth", "yaml"),
)
_FORKED_WITH_CARE = "jemalloc_bg_thd"  # a thread of pyarrow's allocator, which stops and starts it around a fork
# begins of names of variables that no import depends on, or that this process sets as the servers do
_MAY_CHANGE = (
    *("RAY_", "PYTEST_", "WANDB_", "VLA_RL_FORK", "VLA_RL_FAULTS", "GLOO_", "NCCL_"),
    *("MUJOCO_", "NUMBA_", "MESA_", "__GL_", "MPLCONFIGDIR", "LIBERO_CONFIG_PATH"),
)
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_MAX_": -4}  # parameters of mallopt
_MOST = 2**31 - 1
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl; a process that is forked later does not have it


class _Servers:
    """The driver's side: started servers, and what they have been asked to import."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.held = HeldFolder(session_root())
        listeners = {}
        for kind in _KINDS:
            listeners[kind] = socket.socket(socket.AF_UNIX)
            listeners[kind].bind(socket_of(self.held.path, kind))
            listeners[kind].listen(_BACKLOG)  # requests wait there until the server has imported what it needs
        numbers = {kind: listener.fileno() for kind, listener in listeners.items()}
        # one thread, since a forked process has no others; idle ones sleep instead of spinning on their cores
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with only_the_driver_is_told_to_stop():
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps(numbers)],
                stdin=subprocess.PIPE,  # its end tells the servers of the driver's
                stdout=subprocess.DEVNULL,  # libraries talk when they are imported
                stderr=subprocess.DEVNULL,
                cwd=CODE,
                env=os.environ | threads,
                pass_fds=tuple(numbers.values()),
                start_new_session=True,  # Ctrl-C in the terminal is for the driver
            )
        for listener in listeners.values():
            listener.close()

    def preload(self, kind: str, modules: Sequence[str]) -> None:
        """Let a server import further modules before its next fork. Does not wait."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
            asked.connect(socket_of(self.held.path, kind))
            _send(asked, {"modules": list(modules)})

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.held.path, ignore_errors=True)
        self.held.release()


@contextlib.contextmanager
def only_the_driver_is_told_to_stop() -> Iterator[None]:
    """Processes that are started within the block never see SIGTERM.

    Schedulers send it to all processes of a job. The driver then ends the run with a checkpoint, and needs the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_started: _Servers | None = None


def modules_of(config: RunConfig) -> dict[str, list[str]]:
    """What a run's processes import, but for Ray, by the kind of server."""
    simulator = [] if plugin_of(config.env) else [f"envs.{config.env.name}.env"]
    policy = ["vla_rl.learner.learner", "vla_rl.inference.policy_runner", "deepspeed"]
    return {
        BASE: ["vla_rl.replay.store"],
        POLICY: [*policy, *policy_modules(config.policy)],
        SIMULATOR: ["vla_rl.rollout.env_worker", *simulator],
    }


def start_fork_servers(modules: Mapping[str, Sequence[str]]) -> None:
    """Start the servers, unless they run, and let them import ``modules``, by kind. Does not wait for that.

    A variable of this process tells Ray's where they are. There are none on a machine with GPUs, whose driver a process
    must not have touched before it forks.
    """
    global _started
    os.environ.pop(FOLDER, None)  # of a process that has started this one
    if Machine.detect().gpus or sys.platform != "linux":
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_MAY_CHANGE)}
    if _started is not None and (_started.process.poll() is not None or _started.environment != environment):
        _stop()
    if _started is None:
        _started = _Servers(environment)
        atexit.register(_stop)
    for kind, names in modules.items():
        _started.preload(kind, names)
    os.environ[FOLDER] = str(_started.held.path)


def _stop() -> None:
    global _started
    if _started is not None:
        _started.close()
        _started = None
        atexit.unregister(_stop)


def main(listeners: dict[str, int]) -> None:
    """The process of the servers."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers that have ended
    _import(_RAY_NEEDS)
    own = next((kind for kind in listeners if kind != BASE and os.fork() == 0), BASE)
    if own != BASE:  # ends with the first server also while it imports
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    for kind, number in listeners.items():
        if kind != own:
            os.close(number)
    _serve(socket.socket(fileno=listeners[own]))


# consumes: requests. waits for: its socket. unblocked by: requests, the end of the driver.
def _serve(listener: socket.socket) -> NoReturn:
    driver = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([listener, driver], [], [])
        if driver in ready:
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
            os._exit(0)
        with contextlib.suppress(OSError, ValueError), listener.accept()[0] as asked:
            request, files = _receive(asked)
            if "modules" in request:
                _import(request["modules"])
            elif _may_fork():
                gc.freeze()  # so that no collection writes to pages that are shared with workers
                if os.fork() == 0:
                    asked.close()
                    listener.close()
                    _become_worker(request, files)
                asked.sendall(b".")
            for file in files:
                os.close(file)


def _import(modules: Sequence[str]) -> None:
    """Import modules, and call the function ``preload`` of those that have one, for what they import later.

    Without those that fail: the worker that needs one will say why.
    """
    for name in modules:
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            getattr(module, "preload", lambda: None)()


def _may_fork() -> bool:
    """A forked process has the calling thread only; what others were about to do, or had locked, would stay so."""
    threads = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    return len(threads) - threads.count(_FORKED_WITH_CARE) == 1 and "ray" not in sys.modules


def _become_worker(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Run the script of the request as if an interpreter had just been started for it."""
    status = 1
    try:
        for place, file in enumerate(files):
            os.dup2(file, place)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # a process group of its own: Ray kills that of a worker that has died
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"])
        os.chdir(request["folder"])
        before = os.environ.get("PYTHONPATH", "")
        os.environ.clear()
        os.environ.update(request["environment"])
        _set_allocator()
        script, *_ = sys.argv = request["arguments"]
        sys.path[:] = [os.path.dirname(script), *_search_path(before)]
        np: Any = sys.modules.get("numpy")
        if np is not None:
            np.random.seed()  # else all workers would draw the same numbers
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _search_path(before: str) -> list[str]:
    """``sys.path`` without its first entry, with what PYTHONPATH names now in place of what it named ``before``."""
    old, new = (text.split(os.pathsep) if text else [] for text in (before, os.environ.get("PYTHONPATH", "")))
    return [*new, *(entry for entry in sys.path[1:] if entry not in old)]


def _set_allocator() -> None:
    """As the variables ask that glibc reads at the start of a process."""
    for name, parameter in _MALLOC.items():
        if name in os.environ:
            ctypes.CDLL(None).mallopt(parameter, min(int(os.environ[name]), _MOST))


def _send(asked: socket.socket, request: Mapping[str, Any]) -> None:
    data = json.dumps(request).encode()
    asked.sendall(len(data).to_bytes(4, "little") + data)


def _receive(asked: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and its open files. Raises OSError or ValueError if it is not whole."""
    files = array.array("i")
    header, control, _, _ = asked.recvmsg(4, socket.CMSG_LEN(3 * files.itemsize))
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    with asked.makefile("rb") as stream:
        request: dict[str, Any] = json.loads(stream.read(int.from_bytes(header, "little")))
    return request, list(files)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
