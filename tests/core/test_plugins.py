"""Parts of other packages: entry points, module:Class, and what is said about those that cannot be used."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_rl.commands.cli import main
from vla_rl.commands.config import config_docs, config_schema
from vla_rl.commands.parts import parts_of
from vla_rl.config.loading import ConfigError, dump_config, load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core import plugins
from vla_rl.core.plugins import PluginError, reference_to

CODE = '''
from typing import ClassVar
from algos.ppo import PPO, PPOConfig

class Quiet(PPO):
    """PPO that says nothing."""
    class Config(PPOConfig):
        volume: int = 3

class NoConfig:
    pass
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed package with entry points, one of which is broken."""
    name = f"quiet_{tmp_path.name.rpartition('_')[2]}"
    (tmp_path / f"{name}.py").write_text(CODE)
    about = tmp_path / f"{name}-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    points = f"[vla_rl.algos]\nquiet_ppo = {name}:Quiet\nbroken = {name}_gone:Thing\n"
    (about / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    schema = RunConfig.model_fields["algo"]
    before = schema.annotation
    caches = (plugins.installed, plugins.load_plugin, plugins.plugin_config)
    for cached in caches:
        cached.cache_clear()
    yield name
    schema.annotation = before
    RunConfig.model_rebuild(force=True)
    for cached in caches:
        cached.cache_clear()
    sys.modules.pop(name, None)


def test_an_entry_point_is_selected_by_its_name(package: str, tmp_path: Path) -> None:
    assert package not in sys.modules
    config = load_config(None, ["algo=quiet_ppo", "algo.volume=5", "algo.clip_high=0.3"])
    assert (config.algo.name, config.algo.volume, config.algo.clip_high) == ("quiet_ppo", 5, 0.3)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_its_keys_are_checked_like_all_others(package: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["algo=quiet_ppo", "algo.volume=loud", "algo.volme=1", "algo.minibatches=0"])
    text = str(caught.value)
    assert "algo.volume=loud (command line): must be a whole number" in text
    assert "algo.volme=1 (command line): unknown key; did you mean algo.volume?" in text
    assert "algo.minibatches=0 (command line): must be at least 1" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Thing", "no_such_module cannot be imported"),
        ("{package}:Missing", "{package} has no Missing"),
        ("{package}:NoConfig", "{package}:NoConfig has no Config"),
        ("broken", "broken (of the package {package}): {package}_gone cannot be imported"),
        (
            "quiet_pp",
            "did you mean quiet_ppo? allowed: ppo, grpo, rloo, awr, rft, recap, iql, td3_bc, sac, rlpd, dsrl, "
            "best_of_n, dagger, broken, quiet_ppo, or your",
        ),
        ("__main__:Thing", "cannot import __main__"),
    ],
)
def test_a_part_that_cannot_be_used_is_one_clear_problem(package: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"algo": {"name": name.format(package=package), "volume": 3}})
    (problem,) = caught.value.problems
    assert problem.startswith(f"algo.name={name.format(package=package)}")
    assert message.format(package=package) in problem


def test_the_list_the_schema_and_the_page(package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {part["name"]: part for part in parts_of("algo")}
    assert listed["quiet_ppo"] == {
        "group": "algo",
        "name": "quiet_ppo",
        "origin": f"{package} 1.2",
        "about": "PPO that says nothing.",
    }
    assert "cannot be used" in listed["broken"]["about"]
    assert listed["ppo"]["origin"] == "vla_rl"
    assert main(["list", "--json", str(tmp_path / "list.json")]) == 0
    assert "algo=quiet_ppo" in capsys.readouterr().out
    assert "libero_ppo" in json.loads((tmp_path / "list.json").read_text())["configs"]
    assert config_schema()["$defs"]["quiet_ppo"]["properties"]["volume"]["default"] == 3
    assert "quiet_ppo" not in config_docs(), "the page is about what comes with vla_rl"


def test_classes_that_other_processes_cannot_import_are_refused() -> None:
    class Local:
        pass

    with pytest.raises(PluginError, match="move it to the top of a module"):
        reference_to(Local)
    with pytest.raises(PluginError, match="move it to the top of a module"):
        load_config({"algo": Local})
