"""Pictures of what people see, for docs/screens.md; see scripts/screenshots.sh. Exits with 1 if axe objects."""

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from markdown_it import MarkdownIt
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs/assets/screens"
TERMINAL_COLUMNS = 80
PATIENCE_MS = 180_000  # a page of films is drawn without a GPU
WIDE, NARROW = 1280, 420  # pixels: a laptop, a telephone
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")

# as a code host shows a README: a column of text, tables with thin lines
README_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 830px; margin: 32px auto; padding: 0 24px }
h1, h2 { border-bottom: 1px solid #8884; padding-bottom: .3em }
pre, code { background: #8882; border-radius: 6px; font-size: 85% } code { padding: .1em .3em }
pre { padding: 16px; overflow: auto } pre code { background: none; padding: 0 }
table { border-collapse: collapse } td, th { border: 1px solid #8886; padding: 6px 13px } img { max-width: 100% }
"""


@dataclass(frozen=True)
class Screen:
    """A page and how it is looked at."""

    name: str
    address: str
    width: int
    height: int  # pixels from the top; what lies below is not in the picture
    themes: tuple[Literal["light", "dark"], ...] = THEMES
    checked: bool = True  # by axe
    part: str | None = None  # a selector, of what is in the picture alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run, with its report.html")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM", "/usr/bin/chromium"))
    args = parser.parse_args()
    report, site = args.run.resolve() / "report.html", ROOT / "site/index.html"
    for path, made_by in ((report, f"vla-rl report {args.run}"), (site, "bash scripts/build_docs.sh")):
        if not path.is_file():
            sys.exit(f"{path} does not exist: {made_by}")
    args.output.mkdir(parents=True, exist_ok=True)
    pages = {"readme": ROOT / "README.screens.html", "terminal": args.output / "terminal.html"}
    pages["readme"].write_text(readme_page(ROOT / "README.md"))
    pages["terminal"].write_text(terminal_picture(args.run))
    screens = [
        Screen("report_wide", report.as_uri(), WIDE, 2400),
        Screen("report_narrow", report.as_uri(), NARROW, 2400),
        Screen("readme", pages["readme"].as_uri(), WIDE, 2400, ("light",), checked=False),
        Screen("terminal", pages["terminal"].as_uri(), 900, 560, ("dark",), checked=False, part="svg"),
        Screen("site", site.as_uri(), WIDE, 900, checked=False),
    ]
    try:
        with chromium(args.chromium) as browser:
            violations = [line for screen in screens for line in take(browser, screen, args.output)]
    finally:
        for path in pages.values():
            path.unlink()
    print("\n".join(violations) or "axe: no violations")
    return int(bool(violations))


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def take(browser: Browser, screen: Screen, folder: Path) -> list[str]:
    """One picture for each theme. Returns what axe objects to, a line each."""
    found = []
    for theme in screen.themes:
        page = browser.new_page(viewport={"width": screen.width, "height": screen.height}, color_scheme=theme)
        page.goto(screen.address, wait_until="load")
        page.wait_for_timeout(500)  # fonts, and the first frames of films
        name = f"{screen.name}_{theme}"
        save(page.locator(screen.part) if screen.part else page, folder / f"{name}.webp")
        if screen.checked:
            result = Axe().run(page)
            found += [
                f"axe: {name}: {v['id']}: {v['help']}, {len(v['nodes'])} places" for v in result.response["violations"]
            ]
        page.close()
    return found


def save(seen: Page | Locator, path: Path) -> None:
    with Image.open(io.BytesIO(seen.screenshot(timeout=PATIENCE_MS))) as image:
        image.save(path, quality=80, method=6)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def readme_page(path: Path) -> str:
    """The README as a page beside it, so that its links to images hold."""
    body = MarkdownIt("commonmark").enable("table").render(path.read_text())
    head = f'<meta charset="utf-8"><title>README</title><style>{README_STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<body>{body}'


def terminal_picture(run: Path) -> str:
    """What ``vla-rl watch`` shows in a terminal of 80 columns: a page with an SVG."""
    command = f"stty cols {TERMINAL_COLUMNS} rows 40; .venv/bin/vla-rl watch --once '{run}'"
    env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    done = subprocess.run(["script", "-qec", command, "/dev/null"], cwd=ROOT, env=env, capture_output=True, check=True)
    console = Console(width=TERMINAL_COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(done.stdout.decode().replace("\r\n", "\n")))
    return console.export_svg(title="vla-rl watch")


if __name__ == "__main__":
    sys.exit(main())
