"""The model card of a pushed run: what was trained, how, how well, how to use it; all of it from the run's files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vla_rl.commands.run_folder import RunFolder

_TAGS = ["robotics", "reinforcement-learning", "vision-language-action", "vla_rl"]


def model_card(run: RunFolder, iteration: int, folder: Path, repo: str, license_id: str) -> str:
    """Markdown with the hub's header. ``folder`` holds the other files, which the card shows if they are there.

    ``license_id``: the license of the weights, as the hub writes it: ``apache-2.0``, ``mit``, ..., ``unknown``.
    """
    results = _json(folder / "evaluation/results.json")
    about = _json(run.path / "metadata.json")
    measured = about | _json(folder / "evaluation/protocol.json")
    index = _model_index(run.path.absolute().name, results, _listed(measured, "assets"), _listed(measured, "engine"))
    parts = [
        _header(license_id, index),
        f"# {run.path.absolute().name}",
        _summary(run, iteration, about),
        _evaluation(run, iteration, results),
        _training(run, iteration, folder),
        _pictures(folder),
        _use(repo),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(license_id: str, index: Sequence[Mapping[str, Any]]) -> str:
    """The hub reads it: license, library, tags, and the results as ``model-index``."""
    data: dict[str, Any] = {"license": license_id, "library_name": "vla_rl", "pipeline_tag": "robotics", "tags": _TAGS}
    if index:
        data["model-index"] = list(index)
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---"


def _model_index(
    name: str, results: Mapping[str, Any], assets: Sequence[str], engines: Sequence[str]
) -> list[dict[str, Any]]:
    """Suites that were played completely, in the hub's form (``huggingface_hub.EvalResult``); none on placeholders.

    Next to each rate stand its 95 % interval and the episodes, next to the suite the assets and the engine (MuJoCo).
    """
    found = [
        {
            "task": {"type": "robotics"},
            "dataset": {
                "name": suite["suite"],
                "type": suite["suite"],
                "args": {"assets": ", ".join(assets), "engine": "; ".join(engines)},
            },
            "metrics": [
                {
                    "type": "success_rate",
                    "name": "success rate",
                    "value": round(suite["success"], 4),
                    "args": {"episodes": suite["episodes"]}
                    | {limit: round(suite[f"success_{limit}"], 4) for limit in ("low95", "high95")},
                }
            ],
        }
        for suite in results.get("suites", [])
        if suite["episodes"] >= suite["planned"]
    ]
    return [{"name": name, "results": found}] if found and "placeholder" not in assets else []


def _listed(about: Mapping[str, Any], key: str) -> list[str]:
    """A run's metadata have one text, a protocol of an evaluation a list; texts that are empty say nothing."""
    value = about.get(key) or []
    return [text for text in ([value] if isinstance(value, str) else value) if text]


def _on_placeholders(run: RunFolder) -> bool:
    return _json(run.path / "metadata.json").get("assets") == "placeholder"


def _summary(run: RunFolder, iteration: int, about: Mapping[str, Any]) -> str:
    config, last = run.config, run.metrics()[-1:]
    hours = last[0].get("time/seconds", 0.0) / 3600 if last else 0.0
    start = config.policy.checkpoint or "random weights"
    text = (
        f"A {config.policy.size_name} policy, trained by vla_rl with {config.algo.name.upper()} on "
        f"{about.get('simulator')}: iteration {iteration} of {config.train.iterations}, {hours:.1f} hours, "
        f"from {start}."
    )
    if _on_placeholders(run):
        text += "\n\n**Trained and measured on placeholder assets: these are not benchmark numbers.**"
    return text


def _evaluation(run: RunFolder, iteration: int, results: Mapping[str, Any]) -> str:
    if results:
        lines = ["## Evaluation", "", *(f"* {fact}" for fact in results["facts"]), ""]
        lines += ["| suite | episodes | success | 95 % |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {suite['suite']} | {suite['episodes']} | {suite['success']:.1%} | "
            f"{suite['success_low95']:.1%} to {suite['success_high95']:.1%} |"
            for suite in results["suites"]
            if suite["episodes"]
        ]
        return "\n".join(
            [*lines, "", "By task, with failures by kind: [evaluation/results.md](evaluation/results.md)."]
        )
    found = [record for record in run.metrics() if record["iteration"] == iteration and "eval/greedy_success" in record]
    if not found:
        return "## Evaluation\n\nNone was made of this iteration."
    record = found[-1]
    return (
        "## Evaluation\n\n"
        f"During training, at this iteration: greedy success {record['eval/greedy_success']:.1%} "
        f"(95 %: {record['eval/greedy_low95']:.1%} to {record['eval/greedy_high95']:.1%}), "
        f"{run.config.train.eval_episodes} episodes. {_states(run)}"
    )


def _states(run: RunFolder) -> str:
    if run.config.train.start_states == "benchmark":
        return "Training started from the same initial states."
    return "Training never saw the initial states of the evaluation."


def _training(run: RunFolder, iteration: int, folder: Path) -> str:
    config = run.config
    rows = {
        "algorithm": config.algo.name,
        "simulator": f"{config.env.name}, all keys in [config.yaml](config.yaml)",
        "start states": config.train.start_states,
        "episodes per update": config.train.batch_episodes,
        "largest staleness": config.max_staleness,
        "learning rate": config.learner.lr,
        "seed": config.seed,
    }
    about = _json(run.path / "metadata.json")
    rows |= {"commit": about.get("git_commit"), "machine": (about.get("machine") or {}).get("cpu")}
    table = _table(("what", "value"), [(name, str(value)) for name, value in rows.items() if value is not None])
    return f"## Training\n\n{table}"


def _pictures(folder: Path) -> str:
    parts = ["![curves](curves.png)"] if (folder / "curves.png").is_file() else []
    if (folder / "evaluation.mp4").is_file():
        parts.append('<video controls src="evaluation.mp4"></video>')
    films = sorted((folder / "evaluation").rglob("*.mp4"), key=lambda path: ("failure" not in path.name, str(path)))
    parts += [f"* [{path.stem}]({path.relative_to(folder)})" for path in films]
    return "\n".join(parts)


def _use(repo: str) -> str:
    return (
        "## Use\n\n```bash\n"
        f"vla-rl eval hf://{repo} --suite all      # measure it again\n"
        f"vla-rl train CONFIG policy.checkpoint=hf://{repo}   # train it further\n"
        "```"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
