"""DAgger clones the expert's chunks and no others."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from algos import make_algorithm
from algos.dagger import DAggerConfig
from algos.rft import RFTConfig
from tests.algos.ppo_case import Case
from vla_rl.core.records import EXPERT_STEPS


def test_the_loss_is_the_mean_over_the_experts_chunks() -> None:
    case = Case(RFTConfig(), episodes=8)
    shown = np.random.default_rng(0).random(case.batch.num_chunks) < 0.4
    case.batch.record[EXPERT_STEPS] = case.batch.num_steps * shown
    case.algorithm = make_algorithm(DAggerConfig())
    case.targets = case.new_targets()
    rows = case.algorithm.trained_chunks(case.targets)
    assert rows.tolist() == np.flatnonzero(shown).tolist()
    assert np.array_equal(case.algorithm.kept_chunks(case.batch), shown)
    loss, sums = case.loss(rows)
    executed = case.batch.step_mask & shown[:, None]
    expected = -case.logprobs.detach().numpy()[executed].mean()
    assert loss.item() == pytest.approx(expected, abs=1e-10)
    metrics = case.algorithm.finish_metrics({name: float(x) for name, x in sums.items()}, case.targets)
    assert "approx_kl" not in metrics, "what was recorded is of the chunk that the expert replaced"


def test_a_limit_that_nothing_can_measure_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"target_kl=0\.02.*leave it at null"):
        DAggerConfig(target_kl=0.02)
