"""Faults that can only come from inside a process, for `vla-rl chaos`: it leaves a file, whoever finds it first fails.

Where the environment variable is not set, which is the rule, nothing can happen.
"""

import os
from pathlib import Path

VARIABLE = "VLA_RL_FAULTS"  # names the folder


def strikes(kind: str) -> bool:
    """Whether a fault of this kind is to happen here and now; true once for each that was ordered."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return False
    try:
        (Path(folder) / kind).unlink()
    except FileNotFoundError:
        return False
    return True


def order(folder: Path, kind: str) -> None:
    """Let the fault happen in the process that comes to its place first."""
    (folder / kind).touch()


def withdraw(folder: Path, kind: str) -> bool:
    """Take the order back; False if the fault has happened."""
    try:
        (folder / kind).unlink()
    except FileNotFoundError:
        return False
    return True
