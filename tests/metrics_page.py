"""The names of docs/metrics.md, for tests that compare them with what a run writes."""

import re

from tests import ROOT

PAGE = ROOT / "docs/metrics.md"


def documented() -> set[str]:
    """All metrics of the page's tables; ``N`` stands for a number."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def undocumented(names: set[str]) -> set[str]:
    """Those of the written ``names`` that the page lacks."""
    known = documented()
    return {name for name in names if name not in known and _general(name) not in known}


def _general(name: str) -> str:
    return re.sub(r"_\d+$", "_N", re.sub(r"/depth\d+_", "/depthN_", name))
