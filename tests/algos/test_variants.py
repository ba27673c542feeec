"""Every algorithm and objective learns from a committed warm start: one by the whole runtime, the others in threads.

The runs are those of configs/studies/variants.yaml with fewer updates, fresher data and one seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests import ROOT
from tests.thread_runtime import thread_run
from vla_rl.commands.study import Run, execute_all, plan_runs, read_study

STUDY = read_study(ROOT / "configs" / "studies" / "variants.yaml")
SHORT = [
    "train.iterations=14",
    "train.max_staleness=1",  # at 2, ratios of plain PPO stay clipped, and it gains little in so few updates
    "train.eval_episodes=100",
    "learner.warmup_iterations=3",
    "log.tensorboard=false",
]
WHOLE_RUNTIME = "ppo"
# One of each kind. The others are held by unit tests; their learning takes half a minute each, with -m exhaustive.
IN_EVERY_RUN = {
    "grpo",
    "awr",
    "success-filtered cloning",
    "iql, reuse 2",
    "ppo, reuse 2",
    "recap",
}
CLONING = ["awr", "success-filtered cloning", "recap"]  # learn more slowly: the start is too good
LENGTHS = {variant: ["train.iterations=24"] for variant in CLONING}
LENGTHS["iql, reuse 2"] = ["train.iterations=20", "algo.critic_steps=60"]  # 200 steps take most of the time
# whose most likely actions hardly change in so few updates (from -4 to 11 points in ten runs): rollouts count instead
SAMPLED_ALONE = {"recap"}


def planned(variant: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The shorter run of a variant."""
    monkeypatch.chdir(ROOT)
    changes = [*STUDY.variants[variant], *LENGTHS.get(variant, [])]
    variants = {variant: changes, "": []}  # a study has two
    shorter = {"variants": variants, "seeds": STUDY.seeds[:1], "overrides": [*STUDY.overrides, *SHORT]}
    return next(plan_runs(STUDY.model_copy(update=shorter), folder))


def require_learned(variant: str, first: dict[str, float], last: dict[str, float], rollouts: list[float]) -> None:
    """Success on the held-out benchmark placements rises, for the most likely actions and for sampled ones."""
    rises = {kind: last[kind] - first[kind] for kind in ("greedy", "sampled")}
    if variant in SAMPLED_ALONE:
        del rises["greedy"]
        rises["rollouts"] = float(np.mean(rollouts[-5:]) - np.mean(rollouts[:5]))
    assert min(rises.values()) > 0, rises
    assert sum(rises.values()) > 0.15, rises


@pytest.fixture(scope="module")
def starts() -> dict[str | None, dict[str, float]]:
    """Success of the warm starts, as far as they have been evaluated, by their folders."""
    return {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=[] if v in IN_EVERY_RUN else [pytest.mark.exhaustive])
        for v in STUDY.variants
        if v != WHOLE_RUNTIME
    ],
)
def test_a_variant_learns_from_the_warm_start(
    variant: str, starts: dict[str | None, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(variant, tmp_path, monkeypatch).config
    assert set(STUDY.variants) > IN_EVERY_RUN
    with thread_run(config, tmp_path) as run:
        start = config.policy.checkpoint
        if start not in starts:
            starts[start] = run.evaluate()
        rollouts = [run.update() for _ in range(config.train.iterations)]
        last = run.evaluate()
    require_learned(variant, starts[start], last, rollouts)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_whole_runtime_learns_from_the_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes, which play, act and train at the same time."""
    run = planned(WHOLE_RUNTIME, tmp_path, monkeypatch)
    execute_all(STUDY.config, [run], 1, Console())
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = metrics
    assert (first["iteration"], last["iteration"]) == (0, run.config.train.iterations)
    ends = [{kind: m[f"eval/{kind}_success"] for kind in ("greedy", "sampled")} for m in (first, last)]
    require_learned(WHOLE_RUNTIME, *ends, [m["rollout/success"] for m in metrics[1:]])
