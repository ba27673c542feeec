"""The pages of docs/: their links, code, pointers into the source, and the site."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from scripts import draw_concepts, error_messages, site_hooks
from tests import ROOT
from vla_rl import ConfigError, load_config
from vla_rl.commands.cli import make_parser

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^()\s]*(?:\([^()\s]*\))?[^()\s]*)\)")
RUN_BY = {  # pages with code, and the tests that run it
    "api.md": "tests/tutorials/test_tutorials.py",
    "tutorials/own_algorithm.md": "tests/tutorials/test_tutorials.py",
    "tutorials/own_environment.md": "tests/tutorials/test_tutorials.py",
    "tutorials/own_policy.md": "tests/tutorials/test_tutorials.py",
    "tutorials/from_nothing.md": "tests/tutorials/test_from_nothing.py",
    "demonstrations.md": "tests/tutorials/test_from_nothing.py",
    "diagnose.md": "tests/commands/test_diagnose.py",
}
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?vla-rl|bash scripts/(?=train\.sh)) ?(.*)")
NOT_RUN = re.compile(r"<!-- not run: \S[^>]+ -->\n+$")  # above a block, with the reason


def named(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(text):
        path, _, anchor = unquote(link).partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", sorted((DOCS / "algorithms").glob("*.md")), ids=named)
def test_pointers_lead_into_the_source(page: Path) -> None:
    pointers = re.findall(r"`([a-z_][\w.]*):([A-Za-z_][\w.]*)`", page.read_text())
    assert pointers
    for module, name in pointers:
        assert name in names_in(ROOT / f"{module.replace('.', '/')}.py"), f"{module} has no {name}"


@cache
def names_in(file: Path) -> set[str]:
    """Functions, classes, methods and constants."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def code_blocks(language: str) -> Iterator[tuple[Path, str, str]]:
    """Page, what stands above, and code of each block."""
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield page, text[: block.start()], block[1]


def test_each_block_of_python_is_run_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for page, above, code in code_blocks("python"):
        compile(code, str(page), "exec")
        name = named(page)
        if name in RUN_BY:
            test = (ROOT / RUN_BY[name]).read_text()
            assert name in test or f'"{page.stem}"' in test, f"{RUN_BY[name]} does not name {name}"
        elif not NOT_RUN.search(above):
            exec(compile(code, str(page), "exec"), {})
    assert {named(page) for page, *_ in code_blocks("python")} >= RUN_BY.keys()


def commands() -> Iterator[tuple[Path, str, list[str]]]:
    """Page, line and arguments of each ``vla-rl``, and of each ``scripts/train.sh`` as ``train``, in blocks of bash."""
    for page, _, code in code_blocks("bash"):
        for line in code.replace("\\\n", " ").splitlines():
            found = COMMAND.match(line.strip())
            if found:
                words = re.sub(r"(^| )(#|[|>&;]).*", "", found[1])
                yield page, line, shlex.split(words.replace("train.sh", "train"))


def test_commands_have_arguments_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    parser, wrong = make_parser(), []
    for page, line, words in commands():
        try:
            _, rest = parser.parse_known_args(words)
        except SystemExit:
            rest = ["-", capsys.readouterr().err]
        if any(word.startswith("-") for word in rest):
            wrong.append(f"{named(page)}: {line}: {rest}")
    assert not wrong
    assert len([*commands()]) > 50


def test_commands_have_keys_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those whose config comes with the project; the tutorials' are tested with them."""
    monkeypatch.chdir(ROOT)
    checked = 0
    for page, line, (command, *words) in commands():
        overrides = [word for word in words if re.match(r"[a-z_.\d]+=(?!\[?[A-Z]+\]?$)", word)]
        shipped = [word for word in words[:2] if word.endswith(".yaml") and (ROOT / word).exists()]
        if command in ("train", "sft", "plan", "profile") and shipped:
            try:
                load_config(shipped[0], overrides)
            except ConfigError as error:
                pytest.fail(f"{named(page)}: {line}: {error}")
            checked += 1
    assert checked > 20


def test_pictures_of_concepts_can_be_drawn_again(tmp_path: Path) -> None:
    draw_concepts.main(tmp_path)
    committed = sorted(path.name for path in (DOCS / "concepts").glob("*.svg"))
    assert committed == sorted(draw_concepts.PICTURES)
    for name in committed:
        assert size_of(tmp_path / name) == size_of(DOCS / "concepts" / name)
        assert f"concepts/{name}" in (DOCS / "concepts.md").read_text()


def size_of(picture: Path) -> list[str]:
    return re.findall(r'viewBox="([^"]+)"', picture.read_text())[:1]


class TestTheSite:
    def test_each_page_is_in_the_navigation(self) -> None:
        nav = re.search(r"^nav:\n.*", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE | re.DOTALL)
        assert nav is not None
        pages = set(re.findall(r"[\w/]+\.md", nav[0]))
        assert pages == {named(page) for page in PAGES} | {site_hooks.REFERENCE, site_hooks.ERRORS}

    def test_the_page_of_docstrings_names_what_is_exported(self) -> None:
        import vla_rl

        directives = re.findall(r"^::: vla_rl\.([\w.]+)\.(\w+)$", site_hooks.reference_page(), re.MULTILINE)
        shown = {name: module for module, name in directives}
        assert {name: vla_rl._HOMES.get(name, "commands.api") for name in vla_rl.__all__}.items() <= shown.items()

    def test_error_messages_are_those_of_the_source(self) -> None:
        source = "raise UserError(f'a={a!r}: no such [a]; ' + f'use {b} or c' if d else e)\n"
        source += "yield Problem(('a',), 'too *large* here', a)"
        assert sorted(error_messages.messages(source)) == [r"a=…: no such \[a\]; use … or c", r"too \*large\* here"]
        page = error_messages.errors_page()
        assert page.count("\n* ") > 300
        assert "* no config given: name one, such as \\`vla-rl train libero\\_ppo\\`" in page

    @pytest.mark.parametrize(
        ("page", "link", "outside"),
        [
            ("a.md", "../README.md", True),
            ("results/a.md", "../b.md", False),
            ("results/a.md", "../../configs", True),
            ("a.md", "https://example.org/../..", False),
        ],
    )
    def test_links_that_leave_docs_are_found(self, page: str, link: str, outside: bool) -> None:
        assert site_hooks.leaves_docs(Path(page).parent, link) == outside

    def test_pins_are_within_the_ranges_of_the_extra(self) -> None:
        from packaging.requirements import Requirement

        lines = (ROOT / "requirements-docs.txt").read_text().splitlines()
        pins = {r.name.lower(): r.specifier for r in map(Requirement, (x for x in lines if x and x[0] != "#"))}
        assert all(re.fullmatch(r"==[\w.]+", str(pin)) for pin in pins.values())
        extra = re.search(r'"docs": \[(.*?)\]', (ROOT / "setup.py").read_text(), re.DOTALL)
        assert extra is not None
        for text in re.findall(r'"([^"]+)"', extra[1]):
            wanted = Requirement(text)
            assert str(pins[wanted.name])[2:] in wanted.specifier

    @pytest.mark.slow
    def test_it_builds_strictly(self, tmp_path: Path) -> None:
        mkdocs = site_builder()
        if mkdocs is None:
            pytest.skip("mkdocs is not installed: bash scripts/build_docs.sh installs it in .venv-docs, and builds")
        done = subprocess.run(
            [*mkdocs, "build", "--strict", "--site-dir", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        page = (tmp_path / "reference.html").read_text()
        assert "load_config" in page
        fetched = re.findall(r'(?:src|href)="(https?://[^"]+)"', (tmp_path / "index.html").read_text())
        assert not [url for url in fetched if not url.startswith("https://squidfunk")], "it reads without a network"


def site_builder() -> list[str] | None:
    """The command mkdocs, of this environment or of the one that scripts/build_docs.sh makes."""
    own = [path for path in (ROOT / ".venv-docs/bin/mkdocs", Path(sys.executable).with_name("mkdocs")) if path.exists()]
    found = own[0] if own else shutil.which("mkdocs")
    return [str(found)] if found else None


def test_the_workflow_builds_the_site() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert "bash scripts/build_docs.sh" in [step.get("run") for step in jobs["docs"]["steps"]]
