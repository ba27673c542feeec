"""A run in text: every width, every line."""

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from vla_rl.observability.panel import LINE, RunPicture, sparkline

TITLE = "PPO on libero_spatial, async: runs/ppo-libero-20260101-120000"
STATUS = "filling the next super-batch, for 100 s: 64 of 64 episodes, 64 running"


def record(iteration: int, **more: float) -> dict[str, float]:
    return {
        "iteration": iteration,
        "rollout/success_played": 0.1 + 0.0008 * iteration,
        "rollout/return": 0.123,
        "throughput/chunks_per_s": 123.45,
        "throughput/env_steps_per_s": 1234.5,
        "throughput/batches_per_s": 0.0123,
        "rollout/staleness_mean": 1.25,
        "episodes/stale": 123456.0,
        "learner/update_kl": 0.0123,
        "learner/clip_fraction": 0.123,
        "learner/explained_variance": -0.12,
        "memory/gib": 123.4,
        "busy/env_workers": 0.9,
        "busy/inference": 0.25,
        "busy/learner": 1.0,
        "time/seconds": 36000.0,
        "time/left_s": 7200.0,
    } | more


def evaluated() -> dict[str, float]:
    values = {"success": 0.46, "low95": 0.36, "high95": 0.56}
    return {f"eval/{kind}_{name}": value for kind in ("greedy", "sampled") for name, value in values.items()}


def picture(count: int = 1000, title: str = TITLE) -> RunPicture:
    run = RunPicture(title, 1000)
    for iteration in range(1, count + 1):
        run.add(record(iteration, **(evaluated() if iteration == 100 else {})))
    return run


def shown(run: RunPicture, width: int, status: str = STATUS) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(run.panel(width, status, 60.0))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_wrapped_or_cut(width: int) -> None:
    lines = shown(picture(), width)
    assert {cell_len(line) for line in lines} == {width}
    inside = [line[2:-2].strip() for line in lines[1:-1]]
    assert inside[0].startswith("iteration 1000/1000 (100 %)")
    assert inside[0].endswith("10.0 h, 2.0 h left")
    highest = f"{100 * last_mean(width - 4):.1f} %"
    assert inside[1] == f"success of the rollouts 90.0 %  (█ is {highest})"
    assert len(inside[2]) == width - 4, "one block a column"
    assert inside[3] == "greedy 46.0 % (95 %: 36 to 56 %), iteration 100"
    assert inside[4] == "sampled 46.0 % (95 %: 36 to 56 %), iteration 100"
    text = "\n".join(inside)
    for label, value in (("staleness", "1.25"), ("dropped as stale", "123456"), ("memory", "123.4 GiB")):
        assert f"{label:<19}{value:>10}" in text
    assert "learner busy" in text
    assert "…" not in text
    assert " ".join(inside[-2:] if width == 60 else inside[-1:]) == STATUS.replace(": ", " " if width == 60 else ": ")
    assert len(lines) <= 24, "a terminal of the usual height"


def last_mean(blocks: int) -> float:
    first = (blocks - 1) * 1000 // blocks
    return sum(0.1 + 0.0008 * i for i in range(first + 1, 1001)) / (1000 - first)


def test_a_long_title_loses_its_middle() -> None:
    top = shown(picture(1, "PPO on libero_spatial, async: " + "/very" * 30 + "/my-run"), 80)[0]
    assert cell_len(top) == 80
    assert "PPO on" in top
    assert "/my-run" in top


def test_there_is_a_panel_before_the_first_figures() -> None:
    lines = shown(RunPicture(TITLE, 120), 80, "starting, for 12 s: simulators 2 of 4, inference 0 of 1, learner 0 of 1")
    assert "iteration 0/120 (0 %)" in lines[1]
    assert "starting, for 12 s: simulators 2 of 4, inference 0 of 1, learner 0 of 1" in lines[2]
    assert len(lines) == 4


def test_a_sparkline_has_every_value_or_their_means() -> None:
    assert sparkline([0.0, 0.25, 0.5], 80) == ("▁▅█", 0.5)
    assert sparkline([0.0, 0.2, 0.4, 0.6], 2) == ("▂█", 0.5)
    assert sparkline([0.0, 0.0], 80) == ("▁▁", 0.0)


def test_a_line_stands_for_itself_and_is_short() -> None:
    line = picture(120).line()
    assert line == (
        "iteration 120/1000 (12 %) | success 19.6 % | greedy 46.0 % (36 to 56 %, iteration 100) | chunks/s 123.45 | "
        "staleness 1.25 | KL 0.0123 | 2.0 h left"
    )
    run = RunPicture(TITLE, 120)
    run.add(record(12) | {f"eval/greedy_{name}": 0.5 for name in ("success", "low95", "high95")})
    assert run.line().startswith(
        "iteration 12/120 (10 %) | success 11.0 % | greedy 50.0 % (50 to 50 %) | chunks/s 123.45 | staleness 1.25 | "
        "KL 0.0123 | 2.0 h left | return 0.123"
    )
    assert len(line) <= LINE
    assert len(run.line()) <= LINE


def test_a_run_that_goes_back_forgets_what_was_later() -> None:
    run = picture(120)
    run.add(record(90, **{"learner/update_kl": math.nan}))
    assert run.iteration == 90
    assert [iteration for iteration, _ in run.successes] == list(range(1, 91))
    assert not run.evaluations
    assert "KL nan" in run.line()
