import threading

import pytest
import torch

from vla_rl.weights import WeightPublisher, WeightReader, create_weights


def _parameters(value: float, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "odd": torch.full((7,), value, dtype=dtype), "z": torch.full((), value)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(tmp_path, dtype):
    source = {name: torch.randn_like(p.float()).to(p.dtype) for name, p in _parameters(0.0, dtype).items()}
    create_weights(tmp_path / "w", source)
    reader, target = WeightReader(tmp_path / "w"), _parameters(0.0, dtype)
    assert reader.newest == -1
    assert not reader.refresh(target)
    WeightPublisher(tmp_path / "w").publish(0, source)
    assert reader.refresh(target)
    assert reader.version == 0
    assert all(torch.equal(source[name], target[name]) for name in source)
    assert not reader.refresh(target), "nothing new: nothing to copy"


def test_other_model_is_refused(tmp_path):
    create_weights(tmp_path / "w", _parameters(0.0))
    with pytest.raises(ValueError, match="bytes"):
        WeightPublisher(tmp_path / "w").publish(0, {"a": torch.zeros(2)})


def test_readers_never_see_a_mixture(tmp_path):
    """A writer publishes as fast as it can; what a reader takes over is always one version, and never an older one."""
    parameters = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    create_weights(tmp_path / "w", parameters)
    publisher, reader = WeightPublisher(tmp_path / "w"), WeightReader(tmp_path / "w")
    publisher.publish(0, parameters)
    stop = threading.Event()

    def write():
        version = 1
        while not stop.is_set():
            publisher.publish(version, {name: torch.full((50_000,), float(version)) for name in parameters})
            version += 1

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    for _ in range(200):
        reader.refresh(parameters)
        values = {float(v) for p in parameters.values() for v in (p.min(), p.max())}
        assert values == {float(reader.version)}
        seen.append(reader.version)
    stop.set()
    writer.join()
    assert seen == sorted(seen)
    assert seen[-1] > 1
