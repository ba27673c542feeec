"""Every algorithm and objective learns: the whole asynchronous runtime, from a committed warm start.

The runs are those of configs/studies/variants.yaml with fewer updates, fresher data and one seed, two at a time.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from tests import ROOT
from vla_rl.commands.study import Run, execute_all, plan_runs, read_study

STUDY = read_study(ROOT / "configs" / "studies" / "variants.yaml")
SHORT = [
    "train.iterations=14",
    "train.max_staleness=1",  # at 2, ratios of plain PPO stay clipped, and it gains little in so few updates
    "train.eval_episodes=100",
    "learner.warmup_iterations=3",
    "log.tensorboard=false",
]
# One of each kind. The others are held by unit tests; their learning takes a minute each, with -m exhaustive.
IN_EVERY_RUN = {
    "ppo",
    "grpo",
    "awr",
    "success-filtered cloning",
    "iql, reuse 2",
    "ppo, reuse 2",
    "recap",
}
CLONING = {"awr", "success-filtered cloning", "iql, reuse 2", "recap"}  # learn more slowly: the start is too good
# whose most likely actions hardly change in so few updates (from -4 to 11 points in ten runs): rollouts count instead
SAMPLED_ALONE = {"recap"}
JOBS = 2  # a run is given a core for inference and one for the learner, and needs about one in all


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Of the selected variants, by name, played to their end."""
    cases = [getattr(item, "callspec", None) for item in request.session.items]
    selected = {case.params["variant"] for case in cases if case is not None and "variant" in case.params}
    folder = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        variants = {name: changes for name, changes in STUDY.variants.items() if name in selected}
        variants |= {name: [*variants[name], "train.iterations=24"] for name in selected & CLONING}
        of_its_start = {_warm_start(changes): name for name, changes in reversed(variants.items())}
        others = set(variants) - set(of_its_start.values())
        variants |= {name: [*variants[name], "train.eval_start=false"] for name in others}
        shorter = {"variants": variants, "seeds": STUDY.seeds[:1], "overrides": [*STUDY.overrides, *SHORT]}
        planned = list(plan_runs(STUDY.model_copy(update=shorter), folder))
        execute_all(STUDY.config, planned, JOBS, Console())
    return {run.variant: run for run in planned}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)  # for all runs, of which the first test waits
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in IN_EVERY_RUN else [pytest.mark.exhaustive]) for v in STUDY.variants]
)
def test_a_variant_learns_from_the_warm_start(runs: dict[str, Run], variant: str) -> None:
    """Success on the held-out benchmark placements rises, for the most likely actions and for sampled ones."""
    warm_start = runs[variant].config.policy.checkpoint
    first = _metrics(next(run for run in runs.values() if run.config.policy.checkpoint == warm_start))[0]
    last = _metrics(runs[variant])[-1]
    assert set(STUDY.variants) > IN_EVERY_RUN
    assert first["iteration"] == 0
    assert last["iteration"] == runs[variant].config.train.iterations
    rises = {kind: last[f"eval/{kind}_success"] - first[f"eval/{kind}_success"] for kind in ("greedy", "sampled")}
    if variant in SAMPLED_ALONE:
        del rises["greedy"]
        rollouts = [line["rollout/success"] for line in _metrics(runs[variant]) if line["iteration"] > 0]
        rises["rollouts"] = float(np.mean(rollouts[-5:]) - np.mean(rollouts[:5]))
    assert min(rises.values()) > 0, rises
    assert sum(rises.values()) > 0.15, rises


def _warm_start(changes: list[str]) -> str:
    return next((change for change in changes if change.startswith("policy.checkpoint=")), STUDY.config.stem)


def _metrics(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
