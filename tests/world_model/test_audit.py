"""The audit on data whose truth is known."""

import json

import numpy as np
import pytest

from vla_rl.world_model.audit import Audit


def outcomes(rng: np.random.Generator, n: int, branches: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True Q of a real chunk [n] and of others of the same state [n, branches], and what the real one earned [n]."""
    state = rng.uniform(0.2, 0.8, n)
    q, others = (np.clip(state[:, None] + 0.15 * rng.standard_normal((n, m)), 0.0, 1.0) for m in (1, branches))
    return q[:, 0], others, (rng.random(n) < q[:, 0]).astype(float)


def audited(ratings: np.ndarray, others: np.ndarray, earned: np.ndarray) -> Audit:
    audit = Audit(capacity=len(earned), confidence=0.95, max_scale=3.0)
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


def test_a_model_that_only_judges_states_does_not_pass_whatever_its_auroc():
    rng = np.random.default_rng(0)
    passes = 0
    for _ in range(100):
        _, others, earned = outcomes(rng, 500)
        state = others.mean(axis=1)
        noise = 0.05 * rng.standard_normal((5, 500))
        verdict = audited(state + noise[0], state[:, None] + noise[1:].T, earned).verdict()
        passes += verdict.passed
        assert verdict.auroc > 0.6
    assert passes <= 15  # 5 % by chance


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


def test_no_verdict_on_few_chunks_or_on_a_model_without_opinion():
    q, others, earned = outcomes(np.random.default_rng(2), 100)
    few = Audit(capacity=512, confidence=0.9, max_scale=1.0)
    few.add(q[:10], others[:10], earned[:10])
    assert not few.verdict().passed
    assert set(few.verdict().metrics()) == {"audit_passed", "audit_scale", "audit_chunks"}
    assert not audited(np.full(100, 0.5), np.full((100, 4), 0.5), earned).verdict().passed


def test_old_chunks_leave_and_a_checkpoint_keeps_the_verdict():
    rng = np.random.default_rng(3)
    audit = Audit(capacity=500, confidence=0.9, max_scale=2.0)
    q, others, earned = outcomes(rng, 500)
    audit.add(1 - q, 1 - others, earned)
    assert not audit.verdict().passed
    q, others, earned = outcomes(rng, 500)
    audit.add(q, others, earned)
    assert audit.verdict().passed, "only the newest count"
    again = Audit(capacity=500, confidence=0.9, max_scale=2.0)
    again.restore(json.loads(json.dumps(audit.state())))
    assert again.verdict() == audit.verdict()
