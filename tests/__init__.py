"""Tests mirror the packages: ``vla_rl/replay/store.py`` is tested by ``tests/replay/test_store.py``."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
