import threading

import pytest
import torch

from vla_rl.core.ipc import weights
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, WeightRelay, create_weight_buffers, weights_nbytes


def _parameters(value: float, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "odd": torch.full((7,), value, dtype=dtype), "z": torch.full((), value)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(tmp_path, dtype):
    source = {name: torch.randn_like(p.float()).to(p.dtype) for name, p in _parameters(0.0, dtype).items()}
    create_weight_buffers(tmp_path / "w", weights_nbytes(source))
    reader, target = WeightReader(tmp_path / "w"), _parameters(0.0, dtype)
    assert reader.published_version == -1
    assert not reader.refresh(target)
    WeightPublisher(tmp_path / "w").publish(0, source)
    assert reader.refresh(target)
    assert reader.policy_version == 0
    assert all(torch.equal(source[name], target[name]) for name in source)
    assert not reader.refresh(target), "nothing new: nothing to copy"


def test_other_model_is_refused(tmp_path):
    create_weight_buffers(tmp_path / "w", weights_nbytes(_parameters(0.0)))
    with pytest.raises(ValueError, match="bytes"):
        WeightPublisher(tmp_path / "w").publish(0, {"a": torch.zeros(2)})


@pytest.mark.parametrize("step", [1, 2])
def test_readers_never_see_a_mixture(tmp_path, step):
    """A writer publishes as fast as it can; what a reader copies is always one version, and never an older one.

    ``step``: every or every other version is published (``train.publish_every``).
    """
    parameters = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    create_weight_buffers(tmp_path / "w", weights_nbytes(parameters))
    publisher, reader = WeightPublisher(tmp_path / "w"), WeightReader(tmp_path / "w")
    publisher.publish(0, parameters)
    stop = threading.Event()

    def write():
        version = step
        while not stop.is_set():
            publisher.publish(version, {name: torch.full((50_000,), float(version)) for name in parameters})
            version += step

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    for _ in range(200):
        reader.refresh(parameters)
        values = {float(v) for p in parameters.values() for v in (p.min(), p.max())}
        assert values == {float(reader.policy_version)}
        seen.append(reader.policy_version)
    stop.set()
    writer.join()
    assert seen == sorted(seen)
    assert seen[-1] > 1


def test_while_a_version_is_written_the_one_before_can_be_read(tmp_path):
    source = _parameters(0.0)
    create_weight_buffers(tmp_path / "w", weights_nbytes(source))
    publisher, reader = WeightPublisher(tmp_path / "w"), WeightReader(tmp_path / "w")
    for version in (3, 5, 9):
        publisher.publish(version, _parameters(float(version)))
        with pytest.raises(ValueError, match="bytes"):  # a writer that dies half-way
            publisher.publish(version + 1, {"a": torch.full((3, 5), -1.0)})
        assert reader.published_version == version
        assert reader.refresh(source)
        assert all(torch.equal(source[name], p) for name, p in _parameters(float(version)).items())


def test_a_relay_copies_a_version_bucket_by_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_BUCKET_BYTES", 32)
    create_weight_buffers(tmp_path / "here", weights_nbytes(_parameters(0.0)))
    publisher, origin = WeightPublisher(tmp_path / "here"), WeightReader(tmp_path / "here")
    create_weight_buffers(tmp_path / "there", origin.nbytes)
    relay, reader, target = WeightRelay(tmp_path / "there"), WeightReader(tmp_path / "there"), _parameters(0.0)

    def buckets(version: int):
        return [origin.bucket(version, index) for index in range(relay.num_buckets)]

    publisher.publish(4, _parameters(4.0))
    assert relay.num_buckets == 3
    assert relay.relay(4, buckets(4))
    assert reader.refresh(target)
    assert reader.policy_version == 4
    assert all(torch.equal(target[name], p) for name, p in _parameters(4.0).items())

    def overtaken():
        yield origin.bucket(5, 0)
        publisher.publish(6, _parameters(6.0))
        yield origin.bucket(5, 1)

    publisher.publish(5, _parameters(5.0))
    assert not relay.relay(5, overtaken())
    assert not reader.refresh(target), "what was copied half stays unread"
    assert relay.relay(6, buckets(6))
    assert reader.refresh(target)
    assert all(torch.equal(target[name], p) for name, p in _parameters(6.0).items())
