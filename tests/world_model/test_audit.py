"""The audit on data whose truth is known."""

import json

import numpy as np
import pytest

from vla_rl.world_model.audit import Audit

RULES: dict = {"prior": (0.5, 0.5), "least": 0.15, "max_scale": 3.0}


def outcomes(rng: np.random.Generator, n: int, branches: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True Q of a real chunk [n] and of others of the same state [n, branches], and what the real one earned [n]."""
    state = rng.uniform(0.2, 0.8, n)
    q, others = (np.clip(state[:, None] + 0.15 * rng.standard_normal((n, m)), 0.0, 1.0) for m in (1, branches))
    return q[:, 0], others, (rng.random(n) < q[:, 0]).astype(float)


def audited(ratings: np.ndarray, others: np.ndarray, earned: np.ndarray) -> Audit:
    audit = Audit(capacity=len(earned), **RULES)
    audit.add(ratings, others, earned)
    return audit


def test_a_right_model_has_slope_one_and_a_right_error():
    slopes, errors = [], []
    for seed in range(60):
        q, others, earned = outcomes(np.random.default_rng(seed), 600)
        verdict = audited(q, others, earned).verdict()
        slopes.append(verdict.slope)
        errors.append(verdict.error)
    assert np.mean(slopes) == pytest.approx(1.0, abs=0.05)
    assert np.std(slopes) == pytest.approx(np.mean(errors), rel=0.25)


def test_a_model_that_only_judges_states_is_not_trusted_whatever_its_auroc():
    rng = np.random.default_rng(0)
    scales = []
    for _ in range(100):
        _, others, earned = outcomes(rng, 1000)
        state = others.mean(axis=1)
        noise = 0.1 * rng.standard_normal((5, 1000))
        verdict = audited(state + noise[0], state[:, None] + noise[1:].T, earned).verdict()
        scales.append(verdict.scale)
        assert verdict.auroc > 0.6
    assert np.mean(scales) < 0.1
    assert np.mean(np.array(scales) == 0.0) > 0.5, "the alarm"


def test_a_misleading_model_fails_and_a_timid_one_is_scaled_up():
    q, others, earned = outcomes(np.random.default_rng(1), 4000)
    middle = q.mean()
    wrong = audited(2 * middle - q, 2 * middle - others, earned).verdict()
    assert wrong.slope < 0
    assert not wrong.passed
    assert wrong.scale == 0.0
    timid = audited(middle + (q - middle) / 2, middle + (others - middle) / 2, earned).verdict()
    assert timid.passed
    assert timid.scale == pytest.approx(2 * audited(q, others, earned).verdict().slope, rel=0.1)


def test_before_it_has_measured_anything_the_audit_goes_by_its_expectation():
    q, others, earned = outcomes(np.random.default_rng(2), 100)
    few = Audit(capacity=512, **RULES)
    few.add(q[:10], others[:10], earned[:10])
    verdict = few.verdict()
    assert (verdict.passed, verdict.scale) == (True, 0.5)
    assert set(verdict.metrics()) == {"audit_passed", "audit_scale", "audit_chunks"}
    blind = audited(np.full(100, 0.5), np.full((100, 4), 0.5), earned).verdict()
    assert blind.scale == 0.5, "a model without any opinion: its advantages are all 0"


def test_expectation_and_measurement_are_combined_by_their_errors():
    q, others, earned = outcomes(np.random.default_rng(5), 300)
    verdict = audited(q, others, earned).verdict()
    weights = np.array([0.5**-2, verdict.error**-2])
    assert verdict.scale == pytest.approx(float(weights @ [0.5, verdict.slope] / weights.sum()))


def test_old_chunks_leave_and_a_checkpoint_keeps_the_verdict():
    rng = np.random.default_rng(3)
    audit = Audit(capacity=500, **RULES)
    q, others, earned = outcomes(rng, 500)
    audit.add(1 - q, 1 - others, earned)
    assert not audit.verdict().passed
    q, others, earned = outcomes(rng, 500)
    audit.add(q, others, earned)
    assert audit.verdict().passed, "only the newest count"
    again = Audit(capacity=500, **RULES)
    again.restore(json.loads(json.dumps(audit.state())))
    assert again.verdict() == audit.verdict()
