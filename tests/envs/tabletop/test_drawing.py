"""The tabletop's images."""

from __future__ import annotations

import numpy as np
import pytest

from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import TabletopVectorEnv
from envs.tabletop.tasks import COLORS
from tests.envs.tabletop.tabletop_helpers import FAMILIES, make, observe, start


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_matters_is_visible(family: str) -> None:
    env = make(family)
    start(env, seed=4)
    before = observe(env).images
    world = env._world
    for name, index, delta in [
        ("tip", 0, 0.01),
        ("tip", 1, 0.01),
        ("tip", 2, 0.01),
        ("blocks", (0, 0), 0.01),
        ("blocks", (1, 1), 0.01),
        ("aperture", (), -0.3 if family == "pick_place" else 0.3),
        *([] if family == "reach" else [("goal", 0, 0.01)]),
    ]:
        array = getattr(world, name)
        key = (0, *index) if isinstance(index, tuple) else (0, index)
        saved = array[key]
        array[key] = saved + delta
        assert not np.array_equal(observe(env).images, before), f"{name} {index} does not show"
        array[key] = saved
    np.testing.assert_array_equal(observe(env).images, before)


def test_families_and_colors_look_different() -> None:
    env = TabletopVectorEnv(TabletopConfig(tasks=FAMILIES, distractors=0), 1)
    start(env, task=0, seed=1)
    red = observe(env).images.copy()
    env._colors[0, 0] = COLORS.index("blue")
    assert not np.array_equal(observe(env).images, red)
    env._colors[0, 0] = COLORS.index("red")
    marks = []
    for family in range(len(FAMILIES)):
        env._family[0] = family
        env._world.goal[0] = (0.5, 0.5)
        marks.append(observe(env).images.copy())
    assert not np.array_equal(marks[0], marks[1])
    assert not np.array_equal(marks[1], marks[2])
