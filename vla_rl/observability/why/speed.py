"""What limits the speed of a run: no faults."""

import math

from vla_rl.observability.why.recorded import Recorded, Verdict

SIMULATORS, INFERENCE, LEARNER = "busy/env_workers", "busy/inference", "busy/learner"
_BUSY = 0.85  # share of the time
_FREE_CORES = 0.8  # machine/cpu below which more processes would find cores
_FULL_CORES = 0.75  # of the run's; roles wait for each other now and then
_ROLES = (SIMULATORS, INFERENCE, LEARNER)
_FULL = 0.9  # of the machine's memory
_SWAPPED_GIB = 0.25
_SLOW = 1.5  # times what the median worker takes for a control step
_MUCH = 0.3  # share of the time


def memory_bound(run: Recorded) -> Verdict | None:
    gib, swapped = run.typical("memory/gib"), run.typical("memory/swap_gib")
    machine = run.metadata.get("machine", {}).get("memory_gib")
    evidence = f"The run holds {gib:.1f} GiB"
    if machine is not None and gib > _FULL * machine:
        evidence += f" of the machine's {machine:g} GiB"
    elif not swapped > _SWAPPED_GIB:
        return None
    if swapped > _SWAPPED_GIB:
        evidence += f", and {swapped:.1f} GiB more were swapped to disk"
    return Verdict(
        f"{evidence}.",
        "Lower placement.env_workers, placement.envs_per_worker, learner.micro_batch or train.batch_episodes.",
    )


def cores_bound(run: Recorded) -> Verdict | None:
    """On a machine without GPUs, roles share the cores: that one of them is always busy does not make it the limit."""
    in_use = max(run.typical("machine/cpu"), _own_cores(run))
    if not _without_gpus(run) or not in_use >= _FULL_CORES:
        return None
    shares = _shares(run)
    if not shares or max(shares.values()) < _BUSY:
        return None  # others use the cores, or the run waits for something else
    rate = run.setting("algo.updates_per_step")  # off-policy: no epochs over what is new
    less = "train.reuse and algo.epochs" if rate is None else f"algo.updates_per_step={rate:g}"
    return Verdict(
        f"{in_use:.0%} of the cores are in use: {_listed(shares)}",
        f"More cores help, or less work for each chunk ({less}, the policy's size, images). "
        "vla-rl benchmark limit CONFIG tells what each part costs, and what cannot be saved.",
    )


def simulator_bound(run: Recorded) -> Verdict | None:
    if run.typical("machine/cpu") < _FREE_CORES:
        return _bound(run, SIMULATORS, "Raise placement.env_workers: cores are free.")
    return _bound(
        run, SIMULATORS, "More cores, smaller images or train.reuse help; vla-rl benchmark limit CONFIG tells more."
    )


def inference_bound(run: Recorded) -> Verdict | None:
    return _bound(
        run,
        INFERENCE,
        f"Batches have {run.typical('throughput/inference_batch'):.1f} rows: raise placement.envs_per_worker and "
        "placement.max_batch, or give inference more devices (vla-rl plan CONFIG).",
    )


def learner_bound(run: Recorded) -> Verdict | None:
    if (rate := run.setting("algo.updates_per_step")) is not None:  # off-policy: no epochs over what is new
        return _bound(run, LEARNER, f"Lower algo.updates_per_step={rate:g}: simulators wait for the learner's steps.")
    wider = "Give it more cores" if _without_gpus(run) else "Raise learner.micro_batch, give it more devices"
    return _bound(run, LEARNER, f"{wider} (vla-rl plan CONFIG), or lower train.reuse.")


def _bound(run: Recorded, role: str, remedy: str) -> Verdict | None:
    """Of several that are busy, the busiest is the limit, unless all share the cores."""
    shares = _shares(run)
    if not shares or shares.get(role, 0.0) < max(_BUSY, *shares.values()) or cores_bound(run) is not None:
        return None
    return Verdict(_listed(shares), remedy)


def _without_gpus(run: Recorded) -> bool:
    """False also where it is not known."""
    return bool(run.metadata.get("machine", {}).get("gpus") == [])


def _own_cores(run: Recorded) -> float:
    """The share of the cores that the run may use, and uses: a container, or taskset, may give it few."""
    cores = run.metadata.get("machine", {}).get("cores", math.inf)
    return run.typical("time/iteration_cpu_s") / run.typical("time/iteration_s") / cores


def _shares(run: Recorded) -> dict[str, float]:
    return {name: run.typical(name) for name in _ROLES if len(run.values(name))}


def _listed(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items()) + "."


def slow_env_worker(run: Recorded) -> Verdict | None:
    ratio = run.typical("throughput/slowest_worker")
    if not ratio > _SLOW:
        return None
    return Verdict(
        f"It takes {ratio:.1f} times as long for a control step as the median one.",
        "Look for other work on its cores or its GPU, and for more simulators than cores (placement.env_workers).",
    )


def evaluations_take_the_time(run: Recorded) -> Verdict | None:
    spent = [
        after["time/seconds"] - before["time/seconds"] - after.get("time/iteration_s", 0.0)
        for before, after in zip(run.metrics, run.metrics[1:], strict=False)
        if any(name.startswith("eval/") for name in after) and all("time/seconds" in m for m in (before, after))
    ]
    total = run.last("time/seconds")
    if not spent or sum(spent) < _MUCH * total:
        return None
    return Verdict(
        f"They took {sum(spent) / 60:.0f} of {total / 60:.0f} minutes, in {len(spent)} iterations.",
        "Raise train.eval_every, or lower train.eval_episodes.",
    )
