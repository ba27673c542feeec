"""How much memory a whole run holds: all of its processes, what they share counted once."""

from __future__ import annotations

import contextlib

import psutil


def resident_gib() -> float:
    """Proportional set size of this process and all of its descendants on this machine, in GiB.

    Summed resident sizes would count shared memory and libraries once per process; where the system tells no
    proportional size (it is Linux's), they are what is left.
    """
    total = 0
    root = psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or belongs to somebody else
            info = process.memory_full_info()
            total += getattr(info, "pss", info.rss)
    return total / 2**30
