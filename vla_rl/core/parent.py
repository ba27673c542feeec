"""A process of a pool ends with the process that started it, however that ended."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """From now on, leave at once when the parent process is gone. Call it in a process of ``multiprocessing``.

    A killed parent cannot tell its pool to stop, and the pool would go on working for nobody. In the main process this
    does nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent.sentinel,), name="end with parent", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
