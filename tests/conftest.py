"""What holds for the whole suite."""

import gc
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs.maniskill.vulkan import vulkan_problem

_files = list[Path]()  # that have begun


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread for torch: the models of tests are so small that more only cost time, most of all in parallel runs.

    What there is when a file begins is left out of garbage collections. LIBERO's environments ask for one with each
    scene, and it would look through all that the suite has imported.
    """
    if item.path not in _files[-1:]:
        _files.append(item.path)
        gc.collect()
        gc.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Exhaustive tests run where ``-m`` names them, and only there; ManiSkill's where ManiSkill can.

    Files with many slow tests come first: at the end of a parallel run one of them would leave the other cores idle.
    (--no-loadscope-reorder in pyproject.toml lets that order stand.)
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    lack = "no package mani_skill" if importlib.util.find_spec("mani_skill") is None else vulkan_problem()
    if lack:
        for item in items:
            if item.get_closest_marker("maniskill"):
                item.add_marker(pytest.mark.skip(reason=f"ManiSkill cannot run here: {lack}"))
    if "exhaustive" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
