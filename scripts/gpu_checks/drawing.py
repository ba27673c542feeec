"""A picture of the results of steps 3 and 4."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vla_rl.observability.plots import figure

Lines = dict[str, list[tuple[int, float]]]  # by kind: rows, chunks a second


def draw(results: dict[str, Any], path: Path) -> None:
    """Chunks a second by rows of a batch, acting and training."""
    acting, training = Lines(), Lines()
    for result in _measured(results, 3):
        name, _, kind = result["name"].partition(", ")
        if name == "act":
            acting.setdefault(kind, []).append((result["rows"], result["value"]))
    for result in _measured(results, 4):
        if result["name"] == "micro-batch":
            rate = 1e3 * result["rows"] / result["value"]
            training.setdefault(f"activations {result['activations']}", []).append((result["rows"], rate))
    setting = results["setting"]
    title = f"OpenVLA-OFT {setting['size']}, {', '.join(setting.get('gpus', ['processor cores']))}"
    with figure(path, title, 1, 2, (11, 4)) as axes:
        for ax, lines, what in zip(axes, (acting, training), ("acting", "training with LoRA"), strict=True):
            for kind, points in lines.items():
                rows, rates = zip(*points, strict=True)
                ax.plot(rows, rates, marker="o", label=kind)
            ax.set(title=what, xlabel="rows of a batch", ylabel="chunks/s", xscale="log", ylim=(0, None))
            ax.set_xticks(setting["rows"], map(str, setting["rows"]))
            ax.minorticks_off()
            ax.grid(alpha=0.3)
            ax.legend()


def _measured(results: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Results of a step that are numbers: a failure is a text."""
    for step in results["steps"]:
        if step["step"] == number:
            yield from (result for result in step["results"] if isinstance(result["value"], float))
