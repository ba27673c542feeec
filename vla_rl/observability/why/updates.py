"""Causes in the updates: learning rate, entropy, staleness, value head.

Thresholds lie outside of what the runs in docs/results had that learned ("healthy"); docs/recipes.md has the pilots
that did not.
"""

import math

import numpy as np

from vla_rl.observability.why.recorded import WINDOW, Recorded, Verdict

_GOOD_KL = 0.01  # nats an action for one update: healthy medians of approx_kl are 0.006 to 0.013
_LARGE_KL = 0.05  # healthy: approx_kl has at most 0.02 over any 10 updates; pilots with 0.05 to 0.2 were harmed
# Good and large, of continuous actions. PPO in libero_offpolicy had 0.06 to 0.08. Cloning there was unsteady at 0.6.
_OF_A_DENSITY = 0.05, 0.25
_SMALL_KL = 3e-4  # 6e-4, in the last updates of libero_spatial_cpu, brought back little
_FEW = 10  # updates in a row that are too large
_LITTLE_ENTROPY = 0.1  # share of the first updates' that is left; healthy: at least 0.78
_NARROWED = 2.0  # nats a number that a density has lost: its deviation is a seventh
_LOW_ESS = 0.5  # healthy: at least 0.7; 0.36 to 0.43, by eight uses of each episode, did harm
_MUCH_STALE = 0.1  # share of the finished episodes; healthy: at most 0.02
_NO_VARIANCE = 0.05  # healthy: at least 0.15 after 30 updates, but for the tabletop, where PPO learns without
_BIASED = 0.3  # of the highest mean return of an update, or of 1, a success
_WARM = 30  # updates after which a value head explains something
_SOLVED = 0.9


def nan_steps(run: Recorded) -> Verdict | None:
    iterations, skipped = run.points("learner/skipped_steps")
    if not skipped.any():
        return None
    return Verdict(
        f"Their gradients were not finite: {skipped.sum():.0f} steps of {np.count_nonzero(skipped)} updates, the last "
        f"of them {iterations[skipped > 0][-1]:.0f}.",
        f"Look at the data in not_finite/ of the run; lower learner.lr{_of(run)}, or learner.precision=fp32.",
    )


def learning_rate_too_high(run: Recorded) -> Verdict | None:
    name, iterations, values = _divergences(run)
    moved = values > 0
    iterations, values = iterations[moved], values[moved]
    if len(values) < _FEW:
        return None
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, _FEW), axis=1)
    worst = int(medians.argmax())
    good, large = _OF_A_DENSITY if _is_density(run) else (_GOOD_KL, _LARGE_KL)
    if medians[worst] <= large:
        return None
    direct = name == "learner/update_kl"
    return Verdict(
        f"{name} had the median {medians[worst]:.2g} nats an action in the updates {iterations[worst]:.0f} to "
        f"{iterations[worst + _FEW - 1]:.0f}; above {large} steps are too large."
        + ("" if direct else " It is the distance to the policy that acted, so stale data raise it, too."),
        f"Set learner.lr{_of(run)} to about {_better_lr(run, medians[worst], good):.1g}, or algo.target_kl={2 * good}.",
        weaker=not direct,
    )


def learning_rate_too_low(run: Recorded) -> Verdict | None:
    at, rates = run.points("learner/lr")
    if len(rates) and at[-1] > (_warmup(run) if run.config else _FEW) and not rates.any():
        return Verdict("learner/lr is 0 in every update: the policy stays as it is.", "Set learner.lr above 0.")
    name, iterations, values = _divergences(run)
    mixed_at, success = run.points("rollout/success")
    mixed = mixed_at[(success > 0) & (success < 1)]  # elsewhere there may be nothing to learn
    told = np.isin(iterations, mixed) & (iterations > _warmup(run))
    median = float(np.median(values[told])) if np.count_nonzero(told) >= WINDOW else np.inf
    if median >= _SMALL_KL or run.learns:
        return None
    return Verdict(
        f"{name} has the median {median:.1g} nats an action, and success does not rise; {_GOOD_KL} is a good step.",
        f"Set learner.lr{_of(run)} to about {_better_lr(run, median):.1g}.",
        weaker=name != "learner/update_kl",
    )


def kl_beyond_its_bound(run: Recorded) -> Verdict | None:
    target = run.setting("algo.target_kl")
    recent = run.values("learner/update_kl")[-WINDOW:]
    if target is None or np.count_nonzero(recent > target) <= len(recent) / 2:
        return None
    steps = run.setting("algo.epochs", 1) * run.setting("algo.minibatches", 1)
    return Verdict(
        f"{np.count_nonzero(recent > target)} of the last {len(recent)} updates exceeded {target:g}, and ended after "
        f"{run.typical('learner/optimizer_steps'):.0f} of {steps} optimizer steps at the median.",
        f"Lower learner.lr{_of(run)} or algo.epochs, so that an update sees all of its data.",
    )


def entropy_collapsed(run: Recorded) -> Verdict | None:
    entropy = run.values("learner/entropy")
    if len(entropy) < WINDOW or run.success_now >= _SOLVED:
        return None
    first, last = float(np.median(entropy[:5])), float(np.median(entropy[-5:]))
    if _is_density(run):  # which a lower temperature narrows on purpose
        start = run.setting("policy.temperature", 1.0)
        collapsed = first - last > _NARROWED + max(0.0, math.log(start / run.setting("policy.temperature_end", start)))
    else:
        collapsed = last < _LITTLE_ENTROPY * first
    if not collapsed:
        return None
    return Verdict(
        f"learner/entropy fell from {first:.3g} to {last:.3g} nats, at a success of {run.success_now:.0%}.",
        f"Go back to an earlier checkpoint with algo.entropy_coef=0.001 or more, or a lower learner.lr{_of(run)}.",
    )


def data_too_stale(run: Recorded) -> Verdict | None:
    stale, trained = run.grown("episodes/stale"), run.grown("episodes/trained")
    if stale > _MUCH_STALE * max(1.0, stale + trained):
        return Verdict(
            f"{stale:.0f} of the last {stale + trained:.0f} finished episodes were dropped as too stale.",
            "Raise train.max_staleness with algo.proximal=recomputed, or lower placement.env_workers.",
        )
    ess, staleness = run.typical("learner/ess"), run.typical("rollout/staleness_mean")
    if not (ess < _LOW_ESS and staleness >= 1):
        return None
    return Verdict(
        f"learner/ess is {ess:.2f} at the median: weights lose {1 - ess:.0%} of the data, at a mean staleness of "
        f"{staleness:.1f} updates.",
        "Lower train.max_staleness, or set algo.proximal=recomputed algo.importance_cap=2; large steps lower it, too.",
        weaker=True,
    )


def value_head_explains_nothing(run: Recorded) -> Verdict | None:
    typical = run.typical("learner/explained_variance")
    if len(run.values("learner/explained_variance")) < _WARM or typical >= _NO_VARIANCE or run.learns:
        return None
    return Verdict(
        f"learner/explained_variance has the median {typical:.2g} in the last {WINDOW} updates, and success does not "
        "rise.",
        f"Raise {_teaching(run)}; set algo.bootstrap=never if failures end by the time limit.",
    )


def critic_expects_too_much(run: Recorded) -> Verdict | None:
    bias, most = run.typical("learner/critic_bias"), max(1.0, run.values("rollout/return").max(initial=0.0))
    if len(run.values("learner/critic_bias")) < WINDOW or not bias > _BIASED * most or run.learns:
        return None
    return Verdict(
        f"learner/critic_bias has the median {bias:.2g} in the last {WINDOW} updates: by so much the critic rates "
        "chunks above what followed them. Success does not rise.",
        _restraint(run),
    )


def _restraint(run: Recorded) -> str:
    """What keeps an actor from following its critic's errors."""
    cloning = run.setting("algo.cloning")
    if cloning == 0 and run.setting("policy.steer") is None:  # a policy that chooses noise cannot clone
        return "Set algo.cloning=2: an actor that does not stay near executed chunks follows the critic's errors."
    rest = "algo.critic_successes=null" + " or a higher algo.cloning" * bool(cloning)
    if run.setting("algo.bootstrap") == "never":
        return f"Set {rest}."
    return f"Set algo.bootstrap=never if the time limit is part of the task; else {rest}."


def _teaching(run: Recorded) -> str:
    """What a value head, or a critic of its own, learns more by."""
    if run.setting("algo.critic_lr") is None:
        return "learner.value_lr (recipes have 3e-3) and algo.value_warmup"
    keys = ("algo.critic_warmup", "algo.critic_steps", "algo.updates_per_step")
    return " and ".join(f"{key} ({value:g})" for key in keys if (value := run.setting(key)) is not None)


def _divergences(run: Recorded) -> tuple[str, np.ndarray, np.ndarray]:
    """Name, iterations and values of the KL divergence of an update, or, in older runs, of what is nearest to it."""
    direct = any("learner/update_kl" in m for m in run.metrics)
    name = "learner/update_kl" if direct else "learner/approx_kl"
    iterations, values = run.points(name)
    if not direct and run.setting("algo.ratio_level", "action") == "chunk":  # nats a chunk: not comparable
        return name, iterations[:0], values[:0]
    return name, iterations, values


def _is_density(run: Recorded) -> bool:
    """Whether actions are continuous. The entropy of tokens is never below 0."""
    of_tokens = "decoding" in run.config.get("policy", {"decoding": None})
    return not of_tokens or bool((run.values("learner/entropy") < 0).any())


def _better_lr(run: Recorded, divergence: float, good: float = _GOOD_KL) -> float:
    """That of an update of ``good``: the divergence grows with the square. At most a factor of 10 at once."""
    factor = math.sqrt(good / max(divergence, 1e-12))
    return float(run.values("learner/lr").max()) * min(10.0, max(0.1, factor))


def _of(run: Recorded) -> str:
    rates = run.values("learner/lr")
    return f" ({rates.max():g})" if len(rates) else ""


def _warmup(run: Recorded) -> int:
    """First updates, which do not train the policy. An off-policy algorithm's setting counts steps of its critic."""
    if len(run.values("learner/critic_steps")):
        trained = run.points("learner/actor_loss")[0]
        return int(trained[0] if len(trained) else run.metrics[-1]["iteration"])
    return run.setting("algo.value_warmup", 0) + run.setting("algo.critic_warmup", 0)
