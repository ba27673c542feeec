import multiprocessing
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vla_rl.core.errors import UserError
from vla_rl.core.ipc.shared_memory import WAKE, Doorbell, SharedArrays, shared_root

LAYOUT = {"a": ((3, 2), "<f4"), "b": ((5,), "|u1"), "none": ((4, 0), "<f4")}


def test_attached_arrays_are_the_same_memory(tmp_path):
    ours = SharedArrays.create(tmp_path / "m", LAYOUT)
    theirs = SharedArrays.attach(tmp_path / "m")
    ours["a"][1] = 7.0
    theirs["b"][4] = 9
    assert theirs["a"].tolist() == [[0, 0], [7, 7], [0, 0]]
    assert ours["b"].tolist() == [0, 0, 0, 0, 9]
    assert theirs["none"].shape == (4, 0)


def test_fill_value_and_name(tmp_path):
    shared = SharedArrays.create(tmp_path / "m", LAYOUT, fill=0xA5)
    assert (shared["b"] == 0xA5).all()
    with pytest.raises(FileExistsError):
        SharedArrays.create(tmp_path / "m", LAYOUT)
    shared.unlink()
    shared.unlink()  # a second time is harmless
    with pytest.raises(FileNotFoundError):
        SharedArrays.attach(tmp_path / "m")
    shared["a"][:] = 1.0  # mapped memory outlives the name
    assert shared["a"].sum() == 6


def test_no_half_made_file_is_ever_visible(tmp_path):
    """Whoever finds the path can attach at once."""
    path, seen = tmp_path / "m", []

    def reader():
        while not path.exists():
            pass
        seen.append(SharedArrays.attach(path)["b"][0])

    thread = threading.Thread(target=reader)
    thread.start()
    SharedArrays.create(path, LAYOUT | {"big": ((1 << 22,), "|u1")}, fill=3)
    thread.join(10)
    assert seen == [3]


def _ring_from_another_process(path):
    Doorbell(path).ring([4, 5, 6])


def test_doorbell_between_processes(tmp_path):
    bell = Doorbell(tmp_path / "bell")
    process = multiprocessing.get_context("spawn").Process(target=_ring_from_another_process, args=(tmp_path / "bell",))
    process.start()
    assert bell.wait(30.0) == [4, 5, 6]
    process.join()


def test_doorbell_waits_without_polling_and_times_out(tmp_path):
    bell = Doorbell(tmp_path / "bell")
    used = time.process_time()
    start = time.monotonic()
    assert bell.wait(0.3) == []
    assert 0.25 < time.monotonic() - start < 10.0
    assert time.process_time() - used < 0.1


def test_doorbell_wakes_a_waiting_thread(tmp_path):
    bell = Doorbell(tmp_path / "bell")
    threading.Timer(0.1, lambda: Doorbell(tmp_path / "bell").ring([WAKE])).start()
    start = time.monotonic()
    assert bell.wait(20.0) == [WAKE]
    assert time.monotonic() - start < 10.0


def test_a_reader_that_never_reads_does_not_block_the_writer(tmp_path):
    bell = Doorbell(tmp_path / "bell")
    for _ in range(100):
        bell.ring(np.arange(1000))
    assert bell.wait(0.0)[:3] == [0, 1, 2]


def test_all_pages_are_there_from_the_start(tmp_path):
    SharedArrays.create(tmp_path / "m", {"big": ((1 << 22,), "|u1")})
    assert 512 * (tmp_path / "m").stat().st_blocks >= 1 << 22


def test_full_shared_memory_is_an_error_that_names_the_remedy(monkeypatch):
    """The kernel itself refuses: no machine has that much."""
    folder = Path(tempfile.mkdtemp(dir=shared_root()))
    try:
        with pytest.raises(UserError, match=r"weights needs 8388608.00 GiB, and .* free; enlarge it: .*--shm-size="):
            SharedArrays.create(folder / "weights", {"big": ((1 << 53,), "|u1")})
        assert not list(folder.iterdir()), "nothing half-made is left"
        SharedArrays.create(folder / "weights", LAYOUT)
    finally:
        shutil.rmtree(folder)
