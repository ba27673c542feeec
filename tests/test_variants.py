"""Every algorithm and objective learns the tabletop from its warm start, through the whole asynchronous runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_rl.report import read_metrics
from vla_rl.runner import train
from vla_rl.study import plan_runs, read_study

ROOT = Path(__file__).parent.parent
STUDY = read_study(ROOT / "configs" / "studies" / "variants.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("variant", STUDY.variants)
def test_it_learns(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled success rise on the held-out benchmark placements, by the committed settings."""
    monkeypatch.chdir(ROOT)
    (run,) = [r for r in plan_runs(STUDY, tmp_path) if (r.variant, r.seed) == (variant, STUDY.seeds[0])]
    assert train(run.config) == 0
    metrics = read_metrics(run.folder)
    before, after = (
        {kind: m[f"eval/{kind}_success"] for kind in ("greedy", "sampled")} for m in (metrics[0], metrics[-1])
    )
    assert min(after[kind] - before[kind] for kind in before) > 0, f"{before} before, {after} after"
    assert sum(after.values()) > sum(before.values()) + 0.15, f"{before} before, {after} after"
