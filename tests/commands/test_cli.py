import importlib
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from envs.base import EnvError
from tests import ROOT
from vla_rl.commands.cli import main
from vla_rl.config.loading import dump_config, load_config
from vla_rl.core.errors import UserError

COMMANDS = ("train", "eval", "serve", "sft", "plot", "benchmark", "doctor")


def run(
    *arguments: str, code: str = "from vla_rl.commands.cli import main; sys.exit(main())"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; {code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """The arguments with which the commands call the parts that do the work, which are replaced."""
    noted: list = []

    def stand_in(module: str, name: str) -> None:
        fake = types.ModuleType(module)
        setattr(fake, name, lambda *arguments: noted.append(arguments) or 0)
        monkeypatch.setitem(sys.modules, module, fake)

    stand_in("vla_rl.commands.train", "train")
    stand_in("vla_rl.commands.evaluate", "evaluate_command")
    stand_in("vla_rl.commands.evaluate_suites", "evaluate_suites_command")
    stand_in("vla_rl.commands.sft", "sft_command")
    return noted


@pytest.mark.parametrize("arguments", [("--help",), *((command, "--help") for command in COMMANDS)], ids=" ".join)
def test_help_answers_at_once(arguments: tuple[str, ...]):
    loaded = "import atexit; atexit.register(lambda: print(sorted(m for m in sys.modules if '.' not in m)));"
    result = run(*arguments, code=f"{loaded} from vla_rl.commands.cli import main; main()")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: vla-rl")
    modules = set(re.findall(r"'(\w+)'", result.stdout.splitlines()[-1]))
    assert "argparse" in modules
    assert not modules & {"numpy", "pydantic", "omegaconf", "rich", "torch", "ray", "transformers"}


@pytest.mark.alone
def test_help_takes_less_than_a_second():
    assert min(timed_help() for _ in range(3)) < 1.0  # the quickest of three: other processes may keep the cores busy


def timed_help() -> float:
    start = time.perf_counter()
    assert run("train", "--help").returncode == 0
    return time.perf_counter() - start


def test_train_passes_config_and_overrides(calls: list, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(ROOT / "configs/tabletop.yaml"), "train.iterations=2", "seed=7"]) == 0
    ((config, resume, *_),) = calls
    assert (config.train.iterations, config.seed, config.env.name, resume) == (2, 7, "tabletop", None)
    assert "tabletop.yaml: ppo on tabletop, 2 iterations" in capsys.readouterr().out


def test_train_resumes_with_the_config_of_the_run(calls: list, tmp_path: Path):
    original = load_config(None, ["env=tabletop", "train.iterations=5"])
    (tmp_path / "config.yaml").write_text(dump_config(original))
    assert main(["train", "--resume", str(tmp_path)]) == 0
    assert main(["train", "--resume", str(tmp_path), "train.iterations=9"]) == 0
    assert main(["train", "train.iterations=9", "--resume", str(tmp_path), "seed=1"]) == 0
    assert main(["train", "--resume", f"{tmp_path}@20"]) == 0
    assert [(resume, iteration) for _, resume, _, iteration in calls] == [(tmp_path, None)] * 3 + [(tmp_path, 20)]
    assert calls[0][0] == original
    assert [config.train.iterations for config, *_ in calls] == [5, 9, 9, 5]
    assert [config.seed for config, *_ in calls] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "no config given"),
        (["train", "train.iterations=2"], "no config given"),
        (["train", "configs/none.yaml"], "configs/none.yaml: does not exist"),
        (["train", "--resume", "runs/none"], "--resume runs/none: no run folder"),
        (["train", "configs/tabletop.yaml", "--resume", "runs/none"], "leave out configs/tabletop.yaml"),
        (["train", "configs/tabletop.yaml", "train.iteration=2"], "did you mean train.iterations?"),
        (["train", "configs/tabletop.yaml", "learner.ranks=9999"], "CPU cores"),
        (["train", "configs/tabletop.yaml", "policy.checkpoint=/none"], "policy.checkpoint=/none"),
    ],
)
def test_mistakes_of_the_user_end_with_status_2_and_one_message(
    arguments: list[str],
    expected: str,
    calls: list,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("vla-rl train: error: ")
    assert expected in shown.err
    assert "Traceback" not in shown.err
    assert not calls


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train", "configs/tabletop.yaml", "--iterations", "2"],
        ["train", "--resume", "runs/x@newest"],
        ["eval"],
        ["eval", "runs/x", "--episodes", "0"],
        ["eval", "runs/x", "--suite", "all", "--videos", "-1"],
        ["eval", "runs/x", "--json", "no/such/folder/result.json"],
        ["doctor", "seed=1"],
    ],
)
def test_unknown_arguments_end_with_status_2(arguments: list[str], calls: list, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "vla-rl" in capsys.readouterr().err
    assert not calls


def test_eval_passes_its_arguments(calls: list, tmp_path: Path):
    file = tmp_path / "result.json"
    arguments = ["--tasks", "1,2", "--episodes", "20", "--sampled", "--json", str(file)]
    assert main(["eval", "runs/x", "seed=1", *arguments, "env.image_size=96"]) == 0
    ((args,),) = calls
    assert args.target == "runs/x"
    assert args.overrides == ["env.tasks=[1,2]", "seed=1", "env.image_size=96"]
    assert (args.episodes, args.sampled, args.json, args.config, args.video) == (20, True, file, None, None)
    assert load_config(None, args.overrides).env.tasks == (1, 2)
    arguments = ["--suite", "all", "--tasks", "1,2", "--per-task", "20", "--videos", "0", "--output", str(tmp_path)]
    assert main(["eval", "runs/x", "seed=1", *arguments, "env.image_size=96"]) == 0
    _, (args,) = calls
    assert (args.suite, args.tasks, args.per_task, args.videos, args.output) == ("all", "1,2", 20, 0, tmp_path)
    assert args.overrides == ["seed=1", "env.image_size=96"]


def test_sft_passes_its_arguments(calls: list):
    assert main(["sft", "configs/libero_ppo.yaml", "seed=1", "--json", "sft.json"]) == 0
    ((args,),) = calls
    assert (args.config, args.overrides, args.json) == (Path("configs/libero_ppo.yaml"), ["seed=1"], Path("sft.json"))


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (UserError("no such thing: make one"), 2, "vla-rl sft: error: no such thing: make one\n"),
        (KeyboardInterrupt(), 130, "vla-rl sft: interrupted\n"),
    ],
)
def test_expected_errors_have_a_message_and_a_status(
    error: BaseException, status: int, expected: str, calls: list, monkeypatch: pytest.MonkeyPatch, capsys
):
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module("vla_rl.commands.sft"), "sft_command", fail)
    assert main(["sft", "any.yaml"]) == status
    assert capsys.readouterr().err == expected


def test_unexpected_errors_keep_their_traceback():
    broken = "from vla_rl.commands import cli, sft; sft.sft_command = lambda args: 1 / 0;sys.exit(cli.main())"
    result = run("sft", "any.yaml", code=broken)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in result.stderr


def test_errors_about_simulators_and_checkpoints_are_errors_of_the_user():
    from vla_rl.policies.base.checkpoint_folder import CheckpointError

    assert issubclass(EnvError, UserError)
    assert issubclass(CheckpointError, UserError)


def test_the_installed_command_is_this_one():
    command = Path(sys.executable).with_name("vla-rl")
    if not os.access(command, os.X_OK):
        pytest.skip("vla_rl is not installed in this environment")
    result = subprocess.run([command, "train"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "no config given" in result.stderr
