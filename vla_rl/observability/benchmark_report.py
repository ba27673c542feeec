"""The result of a benchmark evaluation, from its episodes: success by suite and task, failures by kind, as Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.core.records import EpisodeResult
from vla_rl.observability.success_rate import start_of, success_interval
from vla_rl.observability.verdicts import FAILURES, SET_ASIDE, failure_kind

Row = Mapping[str, Any]  # one episode, as ``episode_row`` makes it


def episode_row(suite: str, instruction: str, result: EpisodeResult) -> dict[str, Any]:
    """JSON-able: what is kept of one episode."""
    episode = result.episode
    return {
        "suite": suite,
        "task": episode.task,
        "instruction": instruction,
        "trial": episode.member,
        "init_state": episode.init_state,
        "seed": episode.seed,
        "success": result.success,
        "failure": failure_kind(result),
        "steps": result.steps,
        "seconds": round(result.seconds, 2),
    }


def rate(rows: Sequence[Row]) -> dict[str, Any]:
    """JSON-able: success rate with its 95 % Wilson interval, mean length, failures by kind.

    Episodes that were set aside are counted apart, and are part of nothing else.
    """
    aside = sum(row["failure"] == SET_ASIDE for row in rows)
    rows = [row for row in rows if row["failure"] != SET_ASIDE]
    successes = sum(bool(row["success"]) for row in rows)
    starts = [(row["suite"], start_of(row["task"], row["init_state"], row["seed"])) for row in rows]
    low, high = success_interval(successes, starts)
    return {
        "episodes": len(rows),
        "successes": successes,
        "success": successes / max(1, len(rows)),
        "success_low95": low,
        "success_high95": high,
        "mean_steps": sum(row["steps"] for row in rows) / max(1, len(rows)),
        "failures": dict(Counter(row["failure"] for row in rows if not row["success"]).most_common()),
        "set_aside": aside,
    }


def kinds(part: Mapping[str, Any]) -> dict[str, int]:
    """What became of the episodes of ``rate`` that did not succeed, by kind: failures, then those set aside."""
    return part["failures"] | ({SET_ASIDE: part["set_aside"]} if part["set_aside"] else {})


def kinds_text(part: Mapping[str, Any]) -> str:
    """The same in one line."""
    return ", ".join(f"{kind} {count}" for kind, count in kinds(part).items())


def benchmark_results(rows: Sequence[Row], planned: Mapping[str, int], averaged: Sequence[str]) -> dict[str, Any]:
    """JSON-able: the result of each suite and task, and over the suites that publications average.

    ``planned``: episodes that each suite is to have. ``averaged``: those suites; empty for all.
    """
    suites: list[dict[str, Any]] = []
    for suite, count in planned.items():
        own = [row for row in rows if row["suite"] == suite]
        tasks = [
            {"task": task, "instruction": part[0]["instruction"]} | rate(part)
            for task in sorted({row["task"] for row in own})
            if (part := [row for row in own if row["task"] == task])
        ]
        suites.append({"suite": suite, "planned": count} | rate(own) | {"tasks": tasks})
    counted = [suite for suite in planned if not averaged or suite in averaged]
    overall = rate([row for row in rows if row["suite"] in counted])
    complete = all(suite["episodes"] >= suite["planned"] for suite in suites)
    return {"complete": complete, "overall": {"suites": counted} | overall, "suites": suites}


def markdown(title: str, facts: Sequence[str], results: Mapping[str, Any]) -> str:
    """The report. ``facts``: sentences that a reader needs in order to trust the numbers."""
    lines = [f"# {title}", "", *(f"* {fact}" for fact in facts), ""]
    if not results["complete"]:
        lines += ["**Not complete**: the same command plays the missing episodes.", ""]
    lines += ["| suite | episodes | success | 95 % | steps |", "| --- | ---: | ---: | ---: | ---: |"]
    lines += [_row(suite["suite"], suite, suite["planned"]) for suite in results["suites"]]
    overall = results["overall"]
    if len(overall["suites"]) > 1:
        lines.append(_row(f"together: {', '.join(overall['suites'])}", overall))
    for suite in results["suites"]:
        if not suite["tasks"]:
            continue
        lines += ["", f"## {suite['suite']}", ""]
        lines += ["| task | instruction | episodes | success | 95 % | steps | failures |"]
        lines += ["| ---: | --- | ---: | ---: | ---: | ---: | --- |"]
        for task in suite["tasks"]:
            lines.append(f"| {task['task']} {_row(task['instruction'], task)} {kinds_text(task)} |")
    found = {kind for suite in results["suites"] for kind in kinds(suite)}
    if found:
        lines += ["", "## Failures by kind", "", "| kind | episodes | meaning |", "| --- | ---: | --- |"]
        for kind, meaning in FAILURES.items():
            count = sum(kinds(suite).get(kind, 0) for suite in results["suites"])
            lines += [f"| {kind} | {count} | {meaning} |"] if kind in found else []
    return "\n".join(lines) + "\n"


def _row(name: str, part: Mapping[str, Any], planned: int | None = None) -> str:
    complete = planned is None or part["episodes"] >= planned
    episodes = part["episodes"] if complete else f"{part['episodes']} of {planned}"
    if not part["episodes"]:
        return f"| {name} | {episodes} | - | - | - |"
    interval = f"{part['success_low95']:.1%} to {part['success_high95']:.1%}"
    return f"| {name} | {episodes} | {part['success']:.1%} | {interval} | {part['mean_steps']:.0f} |"
