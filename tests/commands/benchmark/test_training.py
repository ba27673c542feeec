"""`vla-rl benchmark training`: one run under several settings of one key."""

import json

import pytest
import yaml

from vla_rl.commands.benchmark.training import load_variants, summarize
from vla_rl.commands.cli import main
from vla_rl.core.errors import UserError


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yaml"
    values = {
        "env": {"name": "workload", "image_size": 32, "max_episode_steps": 8},
        "policy": {"size": "nano", "chunk_size": 4},
        "train": {"batch_episodes": 4},
        "placement": {"env_workers": 1, "envs_per_worker": 2},
    }
    path.write_text(yaml.safe_dump(values))
    return path


def test_variants_differ_in_the_varied_key_alone(config_file):
    variants = load_variants(config_file, ["seed=3"], "mode=async,sync", 2.0)
    assert list(variants) == ["mode=async", "mode=sync"]
    one, two = variants.values()
    assert (one.mode, two.mode) == ("async", "sync")
    assert one.model_copy(update={"mode": "sync"}) == two
    assert (one.seed, one.train.max_minutes, one.train.eval_episodes) == (3, 2.0, 0)


@pytest.mark.parametrize("vary", ["mode", "mode=", "mode=sync"])
def test_less_than_two_values_are_refused(config_file, vary):
    with pytest.raises(UserError, match="two values or more"):
        load_variants(config_file, [], vary, 1.0)


def test_an_impossible_value_is_a_mistake_of_the_config(config_file, capsys):
    assert main(["benchmark", "training", str(config_file), "--vary", "mode=async,later"]) == 2
    assert "later" in capsys.readouterr().err


def _line(iteration: int, seconds: float, rate: float) -> dict[str, float]:
    rates = {f"throughput/{name}_per_s": rate for name in ("env_steps", "chunks", "episodes", "batches")}
    busy = {f"busy/{name}": rate / 100 for name in ("simulate", "render", "reset", "inference", "learner")}
    return {"iteration": iteration, "time/iteration_s": seconds, "memory/gib": iteration} | rates | busy


def test_rates_are_means_over_time_after_the_warm_up():
    figures = summarize([_line(0, 99.0, 99.0), _line(2, 99.0, 99.0), _line(3, 1.0, 10.0), _line(4, 3.0, 30.0)])
    assert figures["env_steps"] == pytest.approx(25.0)
    assert figures["busy_learner"] == pytest.approx(0.25)
    assert (figures["memory_gib"], figures["iterations"]) == (4, 2)
    with pytest.raises(UserError, match="2 iterations are too few"):
        summarize([_line(1, 1.0, 1.0), _line(2, 1.0, 1.0)])


@pytest.mark.exhaustive
def test_both_modes_are_measured(config_file, tmp_path, capsys):
    output = tmp_path / "figures.json"
    arguments = ["--vary", "mode=async,sync", "--minutes", "0.8", "--json", str(output)]
    assert main(["benchmark", "training", str(config_file), *arguments]) == 0
    medians = json.loads(output.read_text())["medians"]
    for figures in medians.values():
        assert figures["batches"] > 0
        assert figures["episodes"] == pytest.approx(4 * figures["batches"], rel=0.5)
        assert figures["env_steps"] == pytest.approx(8 * figures["episodes"], rel=0.2)
    assert "mode=sync" in capsys.readouterr().out
