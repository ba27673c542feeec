"""A page of charts and tables: one HTML file that needs nothing from elsewhere, not even a network.

Charts are drawn here as SVG, not by a library: their colours follow the reader's theme, a line takes a few kilobytes,
and a short script shows the values under the pointer. A figure of matplotlib would have one theme, plotly.js is 4.6 MB.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 410.0, 8.0, 208.0  # of the plot area, in units of an SVG of 420 x 232 (page.html)
_MOST = 400  # points of a line that are drawn
_COLORS, _DASHES = 6, 4  # in page.css


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        label: its name in the legend.
        x, y: its points, float [N] with N at least 1, without NaN.
        low, high: float [N], limits of a band around it, or of a bar through each of its points.
        kind: "thin" is raw values behind a mean, without a place in the legend; "points" has a mark at each point.
        color: its number.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    kind: Literal["line", "thin", "points"] = "line"
    color: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common x.

    Attributes:
        share: y is a share, drawn from 0 to 100 %.
        floor: the y axis begins here, or lower if there are lower values; None: where the values do.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    share: bool = False
    floor: float | None = None

    @property
    def summary(self) -> str:
        """What a reader hears who does not see the chart."""
        form = "{:.0%}".format if self.share else _short
        said = [
            f"{line.label} from {form(line.y[0])} to {form(line.y[-1])}" for line in self.lines if line.kind != "thin"
        ]
        return f"{self.title}, over {self.x_label}: {'; '.join(said)}"

    def drawn(self) -> dict[str, Any]:
        """Positions and texts for the template, in units of the SVG."""
        from matplotlib.ticker import MaxNLocator

        every_x = np.concatenate([line.x for line in self.lines])
        every_y = np.concatenate([y for line in self.lines for y in (line.y, line.low, line.high) if y is not None])
        if self.share:
            every_y = np.array([0.0, 1.0])  # measured shares of the time may be a little above
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
        y_ticks = locator.tick_values(*_limits(every_y, self.floor))
        x0, x1 = _limits(every_x, 0.0)
        x_ticks = [x for x in locator.tick_values(x0, x1) if x0 <= x <= x1]
        y0, y1 = float(y_ticks[0]), float(y_ticks[-1])

        def across(x: np.ndarray | float) -> Any:
            return _LEFT + (x - x0) / (x1 - x0) * (_RIGHT - _LEFT)

        def up(y: np.ndarray | float) -> Any:
            return _BOTTOM - (y - y0) / (y1 - y0) * (_BOTTOM - _TOP)

        lines = []
        for line in self.lines:
            x, y = _thinned(line.x, line.y)
            about: dict[str, Any] = {"label": line.label, "kind": line.kind}
            about |= {"color": line.color % _COLORS, "dash": line.color % _DASHES}
            about |= {"points": _points(across(x), up(y)), "marks": [], "bars": [], "band": ""}
            if line.kind == "points" or len(x) == 1:
                about["marks"] = list(zip(across(x), up(y), strict=True))
            if line.low is not None and line.high is not None:
                low, high = up(line.low), up(line.high)
                if line.kind == "points":
                    about["bars"] = list(zip(across(line.x), low, high, strict=True))
                else:
                    there, back = _points(across(line.x), high), _points(across(line.x[::-1]), low[::-1])
                    about["band"] = f"{there} {back}"
            lines.append(about)
        return {
            "x_ticks": [(across(x), _short(x)) for x in x_ticks],
            "y_ticks": [(up(y), f"{y:.0%}" if self.share else _short(y)) for y in y_ticks],
            "x_limits": f"{x0:.9g} {x1:.9g}",
            "y_limits": f"{y0:.9g} {y1:.9g}",
            "lines": lines,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts; the first of each row is its head."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Clip:
    """A film within the page.

    Attributes:
        title: what it is of.
        source: its content as an address (``embedded.data_uri``).
        told: what it shows, one sentence or line for each episode.
    """

    title: str
    source: str
    told: Sequence[str]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: notes, then films, charts and tables. One with nothing in it is left out."""

    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    clips: Sequence[Clip] = ()


def render_page(
    title: str, claims: Sequence[str], facts: Sequence[tuple[str, str]], sections: Sequence[Section]
) -> str:
    """The page as HTML. Every text may be anyone's: the template escapes all of them.

    ``claims``: sentences below the title. ``facts``: names and values of a short list.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    own = {name: (here / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["px"] = "{:.1f}".format
    return environment.get_template("page.html").render(
        title=title,
        claims=claims,
        facts=facts,
        sections=[one for one in sections if one.notes or one.charts or one.tables or one.clips],
        own={name: Markup(text) for name, text in own.items()},  # this package writes them
        allowed={name: _digest(text) for name, text in own.items()},
    )


def _digest(text: str) -> str:
    """By which the page's policy admits this text alone as style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _limits(values: np.ndarray, floor: float | None = None) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    low = low if floor is None else min(low, floor)
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most ``_MOST`` points: the lowest and the highest of each stretch, so that peaks stay."""
    if len(x) <= _MOST:
        return x, y
    parts = np.array_split(np.arange(len(y)), _MOST // 2)
    kept = sorted({int(i) for part in parts for i in (part[y[part].argmin()], part[y[part].argmax()])})
    return x[kept], y[kept]


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def _short(value: float) -> str:
    """A number of an axis: 1.5M, 20k, 0.25; without what steps of an axis leave of a zero."""
    value = round(value, 12)
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    return f"{value / 1e3:.4g}k" if abs(value) >= 1e4 else f"{value:.4g}"
