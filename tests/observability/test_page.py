"""Pages of charts: what is drawn where, and whether it can be read."""

import base64
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from vla_rl.observability import page
from vla_rl.observability.page import Chart, Line, Section, render_page

CSS = Path(page.__file__).with_name("page.css").read_text()


def line(*y: float, **options) -> Line:
    return Line("loss", np.arange(len(y), dtype=float), np.array(y), **options)


def luminance(color: str) -> float:
    """Relative luminance of an sRGB colour, as WCAG 2.1 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("theme", CSS.split("prefers-color-scheme: dark"), ids=["light", "dark"])
def test_texts_and_lines_stand_out_from_what_is_behind_them(theme: str) -> None:
    colors = {name: luminance(color) for name, color in re.findall(r"--(\w+): (#\w{6})", theme)}
    assert len(colors) == 11
    for name in colors.keys() - {"back", "card", "rule"}:
        for behind in ("back", "card"):
            low, high = sorted((colors[name], colors[behind]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, behind)


@pytest.mark.parametrize(
    ("chart", "limits"),
    [
        (Chart("", "updates", [line(0.02, 0.04)], floor=0.0), "0 0.04"),
        (Chart("", "updates", [line(0.02, 0.04)]), "0.02 0.04"),
        (Chart("", "updates", [line(0.4, 0.7)], share=True), "0 1"),
        (Chart("", "updates", [line(3.0)], floor=0.0), "0 3"),
        (Chart("", "updates", [line(-1.0, 1.0, low=np.array([-2.0, 0.0]), high=np.array([0.0, 2.0]))]), "-2 2"),
    ],
)
def test_the_axis_of_a_chart(chart: Chart, limits: str) -> None:
    drawn = chart.drawn()
    assert drawn["y_limits"] == limits
    assert drawn["y_ticks"][0][0] == pytest.approx(208.0), "the lowest tick is where the area ends"
    assert drawn["y_ticks"][-1][0] == pytest.approx(8.0)


def test_points_are_where_their_values_are() -> None:
    low, high = np.array([0.0, 0.5]), np.array([0.5, 1.0])
    (one, many) = Chart("", "x", [line(0.5), line(0.25, 1.0, low=low, high=high, kind="points")], share=True).drawn()[
        "lines"
    ]
    assert one["marks"] == [(52.0, 108.0)], "a single point is seen"
    assert many["points"] == "52.0,158.0 410.0,8.0"
    assert many["bars"] == [(52.0, 208.0, 108.0), (410.0, 108.0, 8.0)]


def test_a_long_line_keeps_its_peaks() -> None:
    y = np.zeros(10_000)
    y[[17, 7_000]] = 1.0, -1.0
    (drawn,) = Chart("", "x", [line(*y)]).drawn()["lines"]
    heights = [float(pair.split(",")[1]) for pair in drawn["points"].split()]
    assert len(heights) <= 400
    assert (min(heights), max(heights)) == (8.0, 208.0)


def test_an_empty_section_is_left_out_and_a_chart_can_be_heard() -> None:
    chart = Chart("Loss", "updates", [line(1.0, 0.5), line(1.0, 0.25, kind="thin")])
    text = render_page("A run", ["It learns."], [("seed", "0")], [Section("Empty"), Section("Full", charts=[chart])])
    assert "Empty" not in text
    assert 'aria-label="Loss, over updates: loss from 1 to 0.5"' in text


def test_the_policy_of_the_page_admits_its_own_style_and_script_alone() -> None:
    text = render_page("A run", [], [], [])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    for element in ("style", "script"):
        (own,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "style=" not in text
