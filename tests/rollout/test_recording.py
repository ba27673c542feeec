"""One running episode: what an evaluation says about it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vla_rl.core.records import EpisodeSpec
from vla_rl.rollout.recording import Recording


@pytest.mark.parametrize(
    ("potential", "best", "final"),
    [
        ([0.6, 0.7, 0.9, 0.8], 0.75, 0.5),  # from 0.6, half of the way to 1 is 0.8
        ([0.6, 0.5, 0.4], 0.0, 0.0),
        ([0.0, 1.0, 0.0], 1.0, 0.0),
        ([], math.nan, math.nan),  # a simulator without one
    ],
)
def test_progress_is_the_share_of_the_way_from_the_start(potential: list[float], best: float, final: float) -> None:
    recording = Recording(EpisodeSpec(id=0, task=0, seed=0, init_state=0))
    recording.progress += potential
    recording.decisions.append((None, None, None, 3))
    recording.rewards.append(np.zeros(4))
    recording.num_steps.append(4)
    found = recording.result(terminated=False, success=False, frames=())
    assert (found.best_progress, found.final_progress) == pytest.approx((best, final), nan_ok=True)
