"""How near a run is to the limit: arithmetic, the products that are counted, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vla_rl.commands.benchmark import products
from vla_rl.commands.benchmark.limit import Part, bare_costs, spent_parts
from vla_rl.commands.benchmark.products import Products
from vla_rl.commands.cli import main
from vla_rl.config.loading import load_config
from vla_rl.core.errors import UserError

CONFIG = Path("configs/tabletop.yaml")

METRICS = [
    {
        "rollout/chunks": 100.0,
        "throughput/chunks_per_s": 10.0,
        "throughput/env_steps_per_s": 60.0,
        "time/iteration_s": 10.0,
        "time/iteration_cpu_s": 20.0,
        "busy/simulate": 0.4,
        "busy/render": 0.2,
        "busy/reset": 0.2,
        "busy/inference": 0.3,
        "busy/learner": 0.5,
        "cpu/env_workers_s": 8.0,
        "cpu/inference_s": 3.0,
        "cpu/learner_s": 5.0,
    }
]


def test_what_is_spent_for_a_chunk() -> None:
    bare = {"simulate": 0.002, "render": 0.005, "inference": 0.04, "learner": 0.01}
    parts = {part.name: part for part in spent_parts(METRICS, bare, on_gpu=False)}
    spent = {name: part.spent for name, part in parts.items()}
    expected = {"simulate": 40.0, "render": 20.0, "reset": 20.0, "inference": 30.0, "learner": 50.0}
    assert spent == pytest.approx(expected | {"driver, store, Ray": 40.0})
    assert parts["simulate"].bare == pytest.approx(12.0), "a chunk had six control steps"
    assert parts["inference"].needed == 30.0, "what took less here than alone was not slower than the limit"
    assert (parts["reset"].bare, parts["reset"].needed) == (None, 20.0)
    assert parts["driver, store, Ray"].needed == 0.0
    (on_gpu,) = (part for part in spent_parts(METRICS, bare, on_gpu=True) if part.name == "learner")
    assert on_gpu == Part("learner", pytest.approx(50.0), pytest.approx(10.0))


def test_rollouts_that_are_ahead() -> None:
    ahead = METRICS[0] | {"throughput/chunks_per_s": 20.0, "throughput/env_steps_per_s": 120.0}
    spent = {part.name: part.spent for part in spent_parts([ahead], {}, on_gpu=False)}
    assert (spent["inference"], spent["learner"]) == pytest.approx((15.0, 50.0))
    with pytest.raises(UserError, match="--iterations"):
        spent_parts([ahead | {"throughput/chunks_per_s": 0.0}], {}, on_gpu=False)


def test_products_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time of a product replaced by its operations."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    seen = torch.randn(2, 10, 32, requires_grad=True)
    with Products() as noted, FlopCounterMode(display=False) as counted:
        layer(seen).sum().backward()

    def operations(product, args, kwargs):  # type: ignore[no-untyped-def]
        with FlopCounterMode(display=False) as one:
            product(*args, **kwargs)
        return one.get_total_flops()

    monkeypatch.setattr(products, "_seconds", operations)
    assert noted.seconds() == counted.get_total_flops() > 0


def test_what_is_known_of_the_tabletop() -> None:
    config = load_config(CONFIG)
    from envs import env_spec

    found = bare_costs(config, env_spec(config.env))
    assert found.keys() == {"inference", "learner"}
    assert 1e-6 < found["inference"] < found["learner"] < 1.0


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "limit.json"
    arguments = ["policy.size=nano", "policy.checkpoint=null", "train.batch_episodes=4", "train.max_staleness=0"]
    assert main(["benchmark", "limit", str(CONFIG), *arguments, "--iterations", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "milliseconds for each trained chunk" in printed
    assert "of the limit" in printed
    parts = {part["name"]: part for part in json.loads(file.read_text())["parts"]}
    spent, bare = parts["learner"]["spent"], parts["learner"]["bare"]
    assert spent > bare / 4 > 0, "both are timed, and other tests may run at the same time"
    assert parts["simulate"]["bare"] is None
