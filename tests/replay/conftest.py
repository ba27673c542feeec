"""Stores for tests, stopped at their end."""

import pytest

from vla_rl.replay.rules import StoreRules
from vla_rl.replay.store import ReplayStore


def _rules(**changes) -> StoreRules:
    rules = {"batch_episodes": 4, "max_staleness": 1, "num_tasks": 2, "max_episode_steps": 12}
    return StoreRules(**(rules | {"seed": 0, "iterations": 100} | changes))


@pytest.fixture
def make_store():
    stores = []

    def make(**changes) -> ReplayStore:
        stores.append(ReplayStore(_rules(**changes)))
        return stores[-1]

    yield make
    for store in stores:
        store.stop()
