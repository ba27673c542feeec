import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests import ROOT
from vla_rl.commands.benchmark_table import BENCHMARKS
from vla_rl.commands.cli import main
from vla_rl.commands.command_table import COMMANDS
from vla_rl.commands.commands_docs import commands_docs
from vla_rl.commands.config import config_docs, config_schema
from vla_rl.config.loading import ConfigError, dump_config, load_config
from vla_rl.config.messages import kinds
from vla_rl.config.run_config import RunConfig
from vla_rl.config.yaml_file import read_config_file

SHIPPED = [p for p in sorted((ROOT / "configs").rglob("*.yaml")) if p.parent.name not in ("profiles", "studies")]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = config_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize(("what", "name"), [("docs", "configuration.md"), ("commands", "commands.md")])
def test_the_committed_page_is_the_generated_one(what: str, name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["config", what]) == 0
    page = (ROOT / "docs" / name).read_text()
    assert page == capsys.readouterr().out, f"run: vla-rl config {what} > docs/{name}"


def test_the_page_of_commands_has_every_argument():
    page = commands_docs()
    found = {**COMMANDS, **{f"benchmark {name}": benchmark for name, benchmark in BENCHMARKS.items()}}
    for name, (_, _, arguments) in found.items():
        section = page.partition(f"\n## vla-rl {name}\n")[2].partition("\n## ")[0]
        for names, options in arguments:
            choices = re.escape(",".join(options.get("choices", names)))
            shown = re.escape(names[0] if names[0].startswith("-") else options.get("metavar", ""))
            assert re.search(rf"^\| `({shown or rf'{{?{choices}}}?'})[` ]", section, re.MULTILINE), (name, names)


def test_the_page_has_every_key_of_every_kind():
    page = config_docs()
    for group in (
        [f"env={name}" for name in ("libero", "tabletop", "maniskill", "metaworld", "workload")],
        ["algo=grpo", "algo=rloo"],
        ["policy=openvla_oft", "policy=pi0"],
    ):
        for kind in group:
            config = load_config(None, [kind, *([] if kind == "policy=pi0" else ["policy.lora={}"])])
            for key in keys(config.model_dump()):
                assert f"| `{key}` |" in page
            assert f"### {kind}\n" in page


def keys(values: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        if (above, name) not in (("env.", "name"), ("algo.", "name"), ("policy.", "name")):
            found += keys(value, f"{above}{name}.") if isinstance(value, dict) else [f"{above}{name}"]
    return found


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == config_schema()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path, validator: Draft202012Validator):
    file = read_config_file(path)
    assert not file.problems
    validator.validate(file.values)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_whole_config_is_valid(algo: str, validator: Draft202012Validator):
    validator.validate(yaml.safe_load(dump_config(load_config(None, [f"algo={algo}", "policy.lora={}"]))))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "env: tabletop",
        "algo: {name: grpo, group_size: 4}",
        "base: other.yaml\nenv: {backend: physx_cpu}",
        "seed: 1",
    ],
)
def test_every_form_of_a_file_is_valid(text: str, validator: Draft202012Validator):
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "train: {iteration: 3}",
        "trian: {iterations: 3}",
        "train: {iterations: 0}",
        "train: {iterations: '3'}",
        "mode: asink",
        "env: tabletopp",
        "env: {name: libero, distractors: 1}",
        "algo: {name: ppo, group_size: 4}",
        "learner: {betas: [0.9]}",
        "policy: {lora: {rnk: 3}}",
        "seed: -1",
    ],
)
def test_what_loading_refuses_is_invalid(text: str, tmp_path: Path, validator: Draft202012Validator):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.yaml")
    assert not validator.is_valid(yaml.safe_load(text))


def test_every_key_of_the_shared_groups_has_a_description():
    groups = {name: RunConfig.model_fields[name].annotation for name in ("sft", "train", "learner", "placement", "log")}
    for group, kind in (groups | kinds("policy")).items():
        fields = {name: field for name, field in kind.model_fields.items() if name != "name"}
        assert not [f"{group}.{name}" for name, field in fields.items() if not field.description]
