"""Makes lerobot's π0 and π0.5 small in all processes of a run.

Python imports a module of this name when it starts, if its folder is on PYTHONPATH. The environment variable
VLA_RL_SMALL_GEMMA is the size of the vocabulary.
"""

import importlib.abc
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_MODULES = {f"lerobot.policies.{kind}.modeling_{kind}" for kind in ("pi0", "pi05")}


class _SmallOnceImported(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _MODULES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from tests.policies.lerobot.small_gemma import shrink

            shrink(module, int(os.environ["VLA_RL_SMALL_GEMMA"]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "VLA_RL_SMALL_GEMMA" in os.environ:
    sys.meta_path.insert(0, _SmallOnceImported())
