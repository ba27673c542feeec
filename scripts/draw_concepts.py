"""Draws the pictures of docs/concepts.md: python scripts/draw_concepts.py [FOLDER]. They lie on a card of their own, so
that they can be read on light and dark pages."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).resolve().parents[1] / "docs/concepts"
CARD, INK, FAINT = "#f4f6fb", "#1c2433", "#5b6678"
SIMULATE, INFER, STORE, LEARN = "#cfe3ff", "#ffe0b8", "#d8efd3", "#ecd5f5"  # each role keeps its colour
EDGE = {SIMULATE: "#2b6cb0", INFER: "#b7640b", STORE: "#2f7d32", LEARN: "#7b3fa0"}
STYLE: Any = {"svg.hashsalt": "vla_rl", "font.family": "DejaVu Sans", "font.size": 9.5}


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Axes of ``width`` by ``height`` tenths of an inch, written as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / 10, height / 10))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
        axes.axis("off")
        card: Any = {
            "boxstyle": "round,pad=0,rounding_size=1.5",
            "facecolor": CARD,
            "edgecolor": "#c9d1e0",
            "zorder": 0,
        }
        axes.add_patch(FancyBboxPatch((0.3, 0.3), width - 0.6, height - 0.6, **card))
        yield axes
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def box(
    axes: Axes, at: tuple[float, float], size: tuple[float, float], colour: str, title: str, text: str = ""
) -> None:
    """A box with its lower left corner at ``at``; with a text, the title stands above it."""
    (x, y), (width, height) = at, size
    shape: Any = {"boxstyle": "round,pad=0,rounding_size=0.8", "facecolor": colour, "edgecolor": EDGE[colour]}
    axes.add_patch(FancyBboxPatch(at, width, height, **shape))
    middle = x + width / 2
    if not text:
        axes.text(middle, y + height / 2, title, ha="center", va="center", color=INK)
        return
    axes.text(middle, y + height - 1.2, title, ha="center", va="top", color=INK, weight="bold")
    axes.text(middle, y + height - 3.6, text, ha="center", va="top", color=INK, fontsize=8.5, linespacing=1.4)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", **label: Any) -> None:
    """An arrow, with a label beside its middle."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=FAINT, shrinkA=0, shrinkB=0))
    if text:
        at = {"ha": "center", "va": "bottom", "x": (start[0] + end[0]) / 2, "y": (start[1] + end[1]) / 2 + 0.4}
        axes.text(**{**at, "s": text, "color": INK, "fontsize": 8.5, **label})


def draw_processes(path: Path) -> None:
    """The loop of processes."""
    size = 22, 9.5
    with picture(path, 80, 33) as axes:
        workers = "plays episodes, and draws\ninto shared memory;\n1 to hundreds"
        box(axes, (3, 20.5), size, SIMULATE, "EnvWorker", workers)
        servers = "answers in dynamic batches,\neach with one version;\none for each of its devices"
        box(axes, (55, 20.5), size, INFER, "InferenceServer", servers)
        box(axes, (3, 3), size, STORE, "ReplayStore", "admits episodes, and fills\nthe next super-batch;\none in a run")
        box(axes, (55, 3), size, LEARN, "Learner", "trains on one super-batch\nat a time;\n1 to N ranks")
        arrow(axes, (25, 27.5), (55, 27.5), "observations: images, proprioception, task")
        arrow(axes, (55, 23), (25, 23), "action chunk, log-probability, value, version")
        arrow(axes, (15, 20.5), (15, 12.5), "finished episodes", x=16, y=16.5, ha="left", va="center")
        arrow(axes, (11, 12.5), (11, 20.5), "next\nepisode", x=10.2, y=16.5, ha="right", va="center")
        arrow(axes, (25, 7.5), (55, 7.5), "super-batch")
        arrow(axes, (66, 12.5), (66, 20.5), "weights, version + 1", x=65, y=16.5, ha="right", va="center")


def draw_super_batches(path: Path) -> None:
    """What the roles do over time, and which super-batch is in whose hands."""
    simulate, infer, fill, train = 23, 18.5, 14, 9.5
    with picture(path, 80, 30) as axes:
        for name, y in (("simulate", simulate), ("infer", infer), ("fill", fill), ("train", train)):
            axes.text(10.5, y + 1.5, name, ha="right", va="center", color=INK)
        for i in range(11):
            x = 12 + 5.9 * i
            box(axes, (x, simulate), (5.4, 3), SIMULATE, "")
            box(axes, (x + 1.5, infer), (2.4, 3), INFER, "")
        for i, x in enumerate((12, 28, 44, 60)):
            box(axes, (x, fill), (15.4, 3), STORE, f"super-batch {i + 1}, in {'AB'[i % 2]}")
            if i:
                box(axes, (x, train), (11.5, 3), LEARN, f"trains {i}")
                line: Any = {"color": EDGE[LEARN], "lw": 0.9, "ls": ":", "zorder": 0.5}
                axes.plot([x + 11.9] * 2, [train - 0.6, simulate + 3.8], **line)
                axes.text(x + 11.9, train - 0.9, f"version {i}", ha="center", va="top", color=INK, fontsize=8)
        arrow(axes, (12, 5.6), (77, 5.6))
        axes.text(77, 4.4, "time", ha="right", va="top", color=FAINT)
        text = "While one is trained, the next is filled. At a dotted line, inference takes new weights."
        axes.text(12, 3, text, color=INK, va="center", fontsize=8.5)


def draw_chunk(path: Path) -> None:
    """The way of one chunk, in six steps."""
    size = 20, 9.5
    with picture(path, 80, 36) as axes:
        columns = ((14, SIMULATE, "env worker"), (40, INFER, "inference server"), (66, LEARN, "store and learner"))
        for x, colour, name in columns:
            axes.text(x, 33.6, name, ha="center", va="center", color=EDGE[colour], weight="bold")
        observe = "draw into the environment's\nrow, write random numbers,\nring the doorbell"
        box(axes, (4, 22), size, SIMULATE, "1  observe", observe)
        batch = "rows of many workers;\nfires when it is full, or\nbefore anybody is held up"
        box(axes, (30, 22), size, INFER, "2  batch", batch)
        act = "K actions, log-probabilities,\nvalue and version,\ninto the same row"
        box(axes, (30, 8), size, INFER, "3  act", act)
        execute = "up to K control steps,\nto the episode's end;\nrecord the rewards"
        box(axes, (4, 8), size, SIMULATE, "4  execute", execute)
        collate = "the whole episode, with\nits group, unless it is\ntoo stale"
        box(axes, (56, 8), size, STORE, "5  collate", collate)
        learn = "a chunk is one decision;\nsteps that were not\nexecuted do not count"
        box(axes, (56, 22), size, LEARN, "6  train", learn)
        arrow(axes, (24, 27), (30, 27))
        arrow(axes, (40, 22), (40, 17.5))
        arrow(axes, (30, 12.5), (24, 12.5))
        arrow(axes, (14, 17.5), (14, 22), "next chunk", x=14.8, y=19.8, ha="left", va="center")
        axes.plot([14, 14, 66], [8, 4.5, 4.5], color=FAINT, lw=1)
        arrow(axes, (66, 4.5), (66, 8))
        axes.text(40, 3.1, "finished episode", ha="center", va="center", color=INK, fontsize=8.5)
        arrow(axes, (66, 17.5), (66, 22))
        arrow(axes, (56, 27), (50, 27), "weights")


PICTURES = {"processes.svg": draw_processes, "super_batches.svg": draw_super_batches, "chunk.svg": draw_chunk}


def main(folder: Path = FOLDER) -> None:
    """Write all pictures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw(folder / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
