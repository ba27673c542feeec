import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from vla_rl.cluster.processes.weight_relay import relay_source
from vla_rl.core.errors import StallError
from vla_rl.core.ipc import weights
from vla_rl.core.ipc.pinned import PinnedCopies
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, WeightRelay, create_weight_buffers, weights_nbytes


def _parameters(value: float, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "odd": torch.full((7,), value, dtype=dtype), "z": torch.full((), value)}


def _nbytes(parameters: dict[str, torch.Tensor]) -> int:
    return weights_nbytes(p.numel() * p.element_size() for p in parameters.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(tmp_path, dtype):
    source = {name: torch.randn_like(p.float()).to(p.dtype) for name, p in _parameters(0.0, dtype).items()}
    create_weight_buffers(tmp_path / "w", _nbytes(source))
    reader, target = WeightReader(tmp_path / "w"), _parameters(0.0, dtype)
    assert reader.published_version == -1
    assert not reader.refresh(target)
    WeightPublisher(tmp_path / "w").publish(0, source.values())
    assert reader.refresh(target)
    assert reader.version == 0
    assert all(torch.equal(source[name], target[name]) for name in source)
    assert not reader.refresh(target), "nothing new: nothing to copy"


def test_other_model_is_refused(tmp_path):
    create_weight_buffers(tmp_path / "w", _nbytes(_parameters(0.0)))
    with pytest.raises(ValueError, match="bytes"):
        WeightPublisher(tmp_path / "w").publish(0, [torch.zeros(2)])


@pytest.mark.parametrize("step", [1, 2])
def test_readers_never_see_a_mixture(tmp_path, step):
    """A writer publishes as fast as it can; what a reader copies is always one version, and never an older one.

    ``step``: every or every other version is published (``train.publish_every``).
    """
    parameters = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    create_weight_buffers(tmp_path / "w", _nbytes(parameters))
    publisher, reader = WeightPublisher(tmp_path / "w"), WeightReader(tmp_path / "w")
    publisher.publish(0, parameters.values())
    stop = threading.Event()

    def write():
        version = step
        while not stop.is_set():
            publisher.publish(version, [torch.full((50_000,), float(version)) for _ in parameters])
            version += step

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[int] = []
    deadline = time.monotonic() + 60
    while len(seen) < 200 or (len(set(seen)) < 5 and time.monotonic() < deadline):
        reader.refresh(parameters)
        values = {float(v) for p in parameters.values() for v in (p.min(), p.max())}
        assert values == {float(reader.version)}
        seen.append(reader.version)
    stop.set()
    writer.join()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5


def test_while_a_version_is_written_the_one_before_can_be_read(tmp_path):
    source = _parameters(0.0)
    create_weight_buffers(tmp_path / "w", _nbytes(source))
    publisher, reader = WeightPublisher(tmp_path / "w"), WeightReader(tmp_path / "w")
    for version in (3, 5, 9):
        publisher.publish(version, _parameters(float(version)).values())
        with pytest.raises(ValueError, match="bytes"):  # a writer that dies half-way
            publisher.publish(version + 1, [torch.full((3, 5), -1.0)])
        assert reader.published_version == version
        assert reader.refresh(source)
        assert all(torch.equal(source[name], p) for name, p in _parameters(float(version)).items())


def test_a_relay_copies_a_version_bucket_by_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_BUCKET_BYTES", 32)
    create_weight_buffers(tmp_path / "here", _nbytes(_parameters(0.0)))
    publisher, origin = WeightPublisher(tmp_path / "here"), WeightReader(tmp_path / "here")
    create_weight_buffers(tmp_path / "there", origin.nbytes)
    relay, reader, target = WeightRelay(tmp_path / "there"), WeightReader(tmp_path / "there"), _parameters(0.0)

    def buckets(version: int):
        return [origin.bucket(version, index) for index in range(relay.num_buckets)]

    publisher.publish(4, _parameters(4.0).values())
    assert relay.num_buckets == 6
    assert relay.relay(4, buckets(4))
    assert reader.refresh(target)
    assert reader.version == 4
    assert all(torch.equal(target[name], p) for name, p in _parameters(4.0).items())

    def overtaken():
        yield origin.bucket(5, 0)
        publisher.publish(6, _parameters(6.0).values())
        yield origin.bucket(5, 1)

    publisher.publish(5, _parameters(5.0).values())
    assert not relay.relay(5, overtaken())
    assert not reader.refresh(target), "what was copied half stays unread"
    assert relay.relay(6, buckets(6))
    assert reader.refresh(target)
    assert all(torch.equal(target[name], p) for name, p in _parameters(6.0).items())


def test_relays_pass_on_what_has_arrived_and_none_sends_to_more_than_two(tmp_path, monkeypatch):
    """A tree of six nodes: all of them pull at the same time, the leaves from relays that are still receiving."""
    monkeypatch.setattr(weights, "_BUCKET_BYTES", 32)
    create_weight_buffers(tmp_path / "0", _nbytes(_parameters(0.0)))
    publisher, origin = WeightPublisher(tmp_path / "0"), WeightReader(tmp_path / "0")
    sources = {0: lambda version, index: origin.bucket(version, index)}
    sent: Counter[tuple[int, int]] = Counter()

    def bucket_of(number: int, version: int, index: int):
        source = relay_source(number)
        sent[source, number] += 1
        return sources[source](version, index)

    relays = {}
    for number in range(1, 6):
        create_weight_buffers(tmp_path / str(number), origin.nbytes)
        relays[number] = relay = WeightRelay(tmp_path / str(number))
        sources[number] = partial(relay.bucket, timeout=30.0)
    for version in (4, 5):
        publisher.publish(version, _parameters(float(version)).values())
        with ThreadPoolExecutor(5) as pool:  # the last ones first
            pulls = [
                pool.submit(relay.relay, version, map(partial(bucket_of, number, version), range(relay.num_buckets)))
                for number, relay in reversed(relays.items())
            ]
            assert all(pull.result(60.0) for pull in pulls)
        for number in relays:
            target = _parameters(0.0)
            assert WeightReader(tmp_path / str(number)).refresh(target)
            assert all(torch.equal(target[name], p) for name, p in _parameters(float(version)).items())
    assert max(Counter(source for source, _ in sent).values()) == 2
    assert set(sent.values()) == {2 * relays[1].num_buckets}
    assert relays[1].bucket(4, 0, 0.0) is None, "a newer one is here"
    with pytest.raises(StallError, match="bucket 0 of weights 6 has not arrived"):
        relays[1].bucket(6, 0, 0.01)


# --- copies ---------------------------------------------------------------------------------------------------------


def test_one_whole_tensor_is_alive_at_a_time(tmp_path):
    """A learner under ZeRO-3 gathers each parameter when it is asked for."""
    count, alive = 5, []

    def gathered() -> Iterator[torch.Tensor]:
        for number in range(count):
            assert not any(ref() is not None for ref in alive), "the one before is still held"
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            yield tensor
            del tensor

    create_weight_buffers(tmp_path / "w", weights_nbytes([4000] * count))
    WeightPublisher(tmp_path / "w").publish(0, gathered())
    assert len(alive) == count
    target = {str(number): torch.zeros(1000) for number in range(count)}
    assert WeightReader(tmp_path / "w").refresh(target)
    assert [float(p.mean()) for p in target.values()] == [0.0, 1.0, 2.0, 3.0, 4.0]


class _Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that operations copy, and those of new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.allocated = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].numel() * args[0].element_size()
        elif func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.allocated += result.numel() * result.element_size()
        return result


def test_each_side_copies_every_byte_once(tmp_path):
    source = {"a": torch.randn(100, 300), "odd": torch.randn(7).bfloat16(), "turned": torch.randn(64, 32).T}
    nbytes = sum(p.numel() * p.element_size() for p in source.values())
    target = {name: torch.zeros_like(p) for name, p in source.items()}
    create_weight_buffers(tmp_path / "w", _nbytes(source))
    publisher, reader = WeightPublisher(tmp_path / "w"), WeightReader(tmp_path / "w")
    with _Copies() as written:
        publisher.publish(0, source.values())
    with _Copies() as read:
        reader.refresh(target)
    for side in (written, read):
        assert (side.copied, side.allocated) == (nbytes, 0)
    assert all(torch.equal(source[name], target[name]) for name in source)


class _OnGpu:
    """A tensor of a GPU, as far as a copy is concerned."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.copies: list[bool] = []

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        self.copies.append(non_blocking)


@pytest.mark.parametrize("code", [0, 1])
def test_on_a_gpu_the_buffers_are_page_locked_and_one_wait_covers_all_copies(monkeypatch, caplog, code):
    events: list[tuple] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: events.append(("lock", address, nbytes)) or code,
        cudaHostUnregister=lambda address: events.append(("unlock", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    stream = SimpleNamespace(synchronize=lambda: events.append(("wait",)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    host, tensors = torch.zeros(100, dtype=torch.uint8), [_OnGpu() for _ in range(3)]
    copies = PinnedCopies(host)
    copies.copy(torch.zeros(2), torch.ones(2))
    copies.finish()
    assert events == [], "on processor cores there is nothing to lock and to wait for"
    for tensor in tensors:
        copies.copy(tensor, host)
    assert [tensor.copies for tensor in tensors] == [[True]] * 3, "queued"
    assert events == [("lock", host.data_ptr(), 100)]
    copies.finish()
    copies.finish()
    assert events[1:] == [("wait",)]
    del copies
    assert events[2:] == ([] if code else [("unlock", host.data_ptr())])
    assert ("cannot be page-locked" in caplog.text) == bool(code)
