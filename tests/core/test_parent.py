import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil

from vla_rl.core.parent import end_with_parent


def _child(pid_file: str) -> None:
    end_with_parent()
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)


def _middle(pid_file: str) -> None:
    context = multiprocessing.get_context("fork")
    context.Process(target=_child, args=(pid_file,)).start()
    time.sleep(600)


def test_a_process_ends_with_its_killed_parent(tmp_path: Path):
    file = tmp_path / "pid"
    middle = multiprocessing.get_context("spawn").Process(target=_middle, args=(str(file),))
    middle.start()
    deadline = time.monotonic() + 60
    while not (file.is_file() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(file.read_text()))
    assert child.is_running()
    os.kill(middle.pid or 0, signal.SIGKILL)
    middle.join()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it goes on without its parent"
        time.sleep(0.05)
