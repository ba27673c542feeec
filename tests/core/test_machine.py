import os

import pytest

from vla_rl.core import machine
from vla_rl.core.machine import Machine, library_loads


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    files: dict[str, str] = {}
    monkeypatch.setattr(machine, "_cgroup_words", lambda name: files.get(name, "").split())
    return files


def test_this_machine(cgroup: dict[str, str]):
    found = Machine.detect()
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.memory > 1 << 30


def test_a_control_group_limits_processors_and_memory(cgroup: dict[str, str]):
    cgroup |= {"cpu.max": "50000 100000", "memory.max": str(1 << 30)}
    found = Machine.detect()
    assert (found.cpus, found.memory) == (1, 1 << 30)
    cgroup |= {"cpu.max": "max 100000", "memory.max": "max"}
    assert Machine.detect().memory > 1 << 30


def test_libraries():
    assert library_loads("libno-such-thing.so.9", "libc.so.6")
    assert not library_loads("libno-such-thing.so.9")
