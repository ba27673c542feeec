"""The notebooks run from their first cell to their last, in a kernel of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_without_results(file: Path) -> None:
    cells = json.loads(file.read_text())["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_the_first_run_ends_with_a_curve_and_two_films(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update instead of minutes of them."""
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("VLA_RL_NOTEBOOK_MINUTES", "0.01")
    notebook = nbformat.read(ROOT / "notebooks/first_run.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell["id"]: _shown(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"}
    assert "ppo on tabletop, from " in shown["config"]
    assert "<th>greedy success</th>" in shown["train"]
    assert "data:image/png;base64," in shown["curve"]
    assert all("data:video/mp4;base64," in shown[name] for name in ("before", "after"))
    assert shown["before"] != shown["after"]
    (run,) = (tmp_path / "runs").iterdir()
    assert shown["report"].strip() == str(Path("runs", run.name, "report.html"))


def _shown(cell: Any) -> str:
    """Its texts and its HTML."""
    data = [output.get("text") or output.get("data", {}).get("text/html", "") for output in cell["outputs"]]
    return "".join(data)
