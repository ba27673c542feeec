"""`vla-rl benchmark training`: one run under several settings of one key."""

import json

import pytest
import yaml

from vla_rl.benchmark.training import load_variants
from vla_rl.cli import main
from vla_rl.errors import UserError


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yaml"
    values = {
        "env": {"name": "workload", "image_size": 32, "max_episode_steps": 8},
        "policy": {"size": "nano", "chunk_size": 4},
        "train": {"batch_episodes": 4},
        "placement": {"env_workers": 1, "slots_per_worker": 2},
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


@pytest.mark.slow
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
