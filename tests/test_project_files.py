"""Files about the project itself: they parse, agree with the code, and what they point to is there."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import ROOT
from vla_rl.commands.command_table import COMMANDS

SETUP = (ROOT / "setup.py").read_text()
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / ".github").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NEEDED = {"bug": {"what", "doctor", "config"}, "feature": {"aim"}, "result": {"measured", "metadata", "config"}}


def test_the_citation_has_the_version_and_license_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "what the format requires"
    for key in ("version", "license"):
        assert re.findall(rf'^    {key}="(.*)",$', SETUP, re.MULTILINE) == [citation[key]]


def test_ci_runs_the_tests_under_each_python_that_the_package_admits() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    assert "bash scripts/test.sh" in [step.get("run") for step in job["steps"]]
    assert "bash scripts/test.sh" in (ROOT / ".ci/run").read_text()
    versions = job["strategy"]["matrix"]["python"]
    low, below = (int(minor) for minor in re.findall(r'python_requires=">=3\.(\d+),<3\.(\d+)"', SETUP)[0])
    assert versions == [f"3.{minor}" for minor in range(low, below)]


def test_pre_commit_downloads_nothing() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    assert {hook["id"] for hook in repo["hooks"]} == {"ruff", "ruff-format", "mypy"}
    assert all(hook["language"] == "system" for hook in repo["hooks"])


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_issue_forms_ask_for_what_is_needed(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert {"name", "description", "body"} <= form.keys()
    required = {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
    assert NEEDED[file.stem] <= required


def test_there_are_forms_for_bugs_features_and_results() -> None:
    assert [file.stem for file in FORMS] == list(NEEDED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub("`[^`\n]*`", "", BLOCK.sub("", page.read_text()))):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        found = target.exists() and (not heading or heading in anchors(target.read_text()))
        if not found and not re.match("https?:", link):
            dead.append(link)
    assert not dead


def anchors(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them, but for the numbers of those that are there twice."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_pages_for_contributors_are_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= 80


def test_the_readme_fits_a_screen_and_names_what_ci_runs() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert not [line for line in lines if len(line) > 120]
    for command in ("bash scripts/train_libero_ppo.sh", "bash scripts/test.sh"):
        assert [line for line in lines if line.startswith(f"{command} ")]


def test_each_command_is_in_the_tour() -> None:
    tour = (ROOT / "docs/tour.md").read_text()
    assert not [name for name in COMMANDS if not re.search(rf"^vla-rl {name} ", tour, re.MULTILINE)]


def test_each_shipped_checkpoint_is_named_by_a_shipped_config() -> None:
    """They are nearly all of the wheel: what no config needs does not belong there."""
    configs = "\n".join(path.read_text() for path in (ROOT / "configs").rglob("*.yaml"))
    unused = {path.name for path in (ROOT / "checkpoints").iterdir()} - set(re.findall(r"checkpoints/(\w+)", configs))
    assert not unused


@pytest.mark.parametrize("folder", sorted((ROOT / "checkpoints").iterdir()), ids=lambda folder: folder.name)
def test_a_shipped_checkpoint_holds_nothing_that_could_be_left_out_without_a_change(folder: Path) -> None:
    """Its weights need float32, no matrix is there twice, and none is only zeros."""
    weights = load_file(folder / "model.safetensors")
    values = torch.cat([weight.flatten() for weight in weights.values()])
    for dtype in (torch.float16, torch.bfloat16):
        assert (values.to(dtype).float() != values).float().mean() > 0.9, "store it as it is trained, or smaller"
    matrices = [weight for weight in weights.values() if weight.numel() > 1000]
    assert len({weight.numpy().tobytes() for weight in matrices}) == len(matrices)
    assert all(weight.any() for weight in matrices)
