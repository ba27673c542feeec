"""The memory of a run."""

import mmap
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from vla_rl.core.ipc.shared_memory import shared_root
from vla_rl.observability.usage import ProcessorTime, Throughput, resident_gib, swapped_gib

_TOUCH = (
    "import mmap,sys;f=open(sys.argv[1],'r+b');m=mmap.mmap(f.fileno(),0);sum(m[::4096]);print(1,flush=True);input()"
)


_WORK = "import time\nwhile time.process_time() < 0.4: pass\nprint(1, flush=True); input()"


def test_processor_time_is_that_of_all_descendants_and_nothing_counts_twice() -> None:
    spent = ProcessorTime()
    other = subprocess.Popen([sys.executable, "-S", "-c", _WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline()
        first, second = spent.growth(), spent.growth()
    finally:
        other.communicate(b"\n")
    assert 0.35 < first < 2.0
    assert 0.0 <= second < 0.2, "it only waits now"


def test_shared_memory_counts_once_and_page_tables_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil.Process, "memory_full_info")
    before, size = resident_gib(), 256 << 20
    with tempfile.NamedTemporaryFile(dir=shared_root()) as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as mapping:
            for offset in range(0, size, 4096):
                mapping[offset] = 1
            once = resident_gib()
            others = [
                subprocess.Popen(
                    [sys.executable, "-S", "-c", _TOUCH, file.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                for _ in range(2)
            ]
            try:
                for other in others:
                    assert other.stdout is not None
                    assert other.stdout.readline()
                thrice = resident_gib()
            finally:
                for other in others:
                    other.communicate(b"\n")
    assert once - before == pytest.approx(0.25, abs=0.05)
    assert thrice - once < 0.1, "two small processes, and no second copy"


def test_the_slowest_worker_is_compared_with_the_median_one() -> None:
    def worker(seconds: float, steps: float) -> dict[str, float]:
        return {"simulate_s": seconds / 2, "render_s": seconds / 2, "env_steps": steps}

    fast, slow, idle = worker(1.0, 100), worker(3.0, 100), worker(0.0, 0)
    for workers, ratio in (([fast, slow, idle], 3.0), ([fast, fast, slow], 3.0), ([fast, worker(2.0, 200)], 1.0)):
        assert Throughput().measure({"worker": dict(enumerate(workers))})["throughput/slowest_worker"] == pytest.approx(
            ratio
        )
    assert "throughput/slowest_worker" not in Throughput().measure({"worker": {0: slow, 1: idle}})


def test_workers_that_come_and_go_with_their_host_leave_the_others_rates_as_they_are() -> None:
    measured = Throughput(_since=time.monotonic() - 1.0)
    measured.measure({"worker": {0: {"chunks": 10.0}, 1: {"chunks": 50.0}}})
    measured.measure({"worker": {0: {"chunks": 20.0}}})
    assert measured.growth["worker"] == [{"chunks": 10.0}]
    measured.measure({"worker": {0: {"chunks": 30.0}, 1: {"chunks": 5.0}}})
    assert measured.growth["worker"] == [{"chunks": 10.0}, {"chunks": 5.0}], "a new one counts from zero"


def test_the_network_is_measured_where_there_is_one() -> None:
    relays = {
        0: {"network_rows": 3.0, "network_s": 0.03, "network_bytes": 2.0**20, "network_repeated": 1.0, "dropped": 0.0},
        1: {"network_rows": 1.0, "network_s": 0.05, "network_bytes": 2.0**20, "network_repeated": 0.0},
    }
    measured = Throughput(_since=time.monotonic() - 4.0).measure({"relay": relays, "gateway": {0: {"dropped": 2.0}}})
    assert measured["network/latency_ms"] == pytest.approx(20.0)
    assert measured["network/mib_per_s"] == pytest.approx(0.5, rel=0.1)
    assert (measured["network/repeated"], measured["network/dropped"]) == (1.0, 2.0)
    none_answered = Throughput().measure({"relay": {0: {"network_rows": 0.0}}, "gateway": {}})
    assert "network/latency_ms" not in none_answered
    assert not [name for name in Throughput().measure({"relay": {}, "gateway": {}}) if name.startswith("network/")]


def test_swapped_memory_is_that_of_all_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    children = [psutil.Process(), psutil.Process()]  # its own may end meanwhile
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: children)
    processes = 1 + len(children)
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tx\nVmSwap:\t  524288 kB\n")
    assert swapped_gib() == 0.5 * processes
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tkernel thread\n")
    assert swapped_gib() == 0.0
