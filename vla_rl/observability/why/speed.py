"""What limits the speed of a run: no faults."""

import numpy as np

from vla_rl.observability.why.recorded import Recorded, Verdict

SIMULATORS, INFERENCE, LEARNER = "busy/env_workers", "busy/inference", "busy/learner"
_BUSY = 0.85  # share of the time; the busiest role of this project's runs had 0.87 to 1
_FREE_CORES = 0.8  # machine/cpu below which more processes would find cores
_FULL = 0.9  # of the machine's memory
_SWAPPED_GIB = 0.25
_SLOW = 1.5  # times what the median worker takes for a control step
_MUCH = 0.3  # share of the time; this project's runs had up to 0.17


def memory_bound(run: Recorded) -> Verdict | None:
    gib, swapped = run.typical("memory/gib"), run.typical("memory/swap_gib")
    machine = run.metadata.get("machine", {}).get("memory_gib", np.inf)
    if not (swapped > _SWAPPED_GIB or gib > _FULL * machine):
        return None
    on_disk = f", {swapped:.1f} GiB of them swapped to disk" if swapped > _SWAPPED_GIB else ""
    return Verdict(
        f"The run needs {gib:.1f} GiB{on_disk}; the machine has {machine:g} GiB.",
        "Lower placement.env_workers, placement.envs_per_worker, learner.micro_batch or train.batch_episodes.",
    )


def simulator_bound(run: Recorded) -> Verdict | None:
    more = "Raise placement.env_workers: cores are free."
    busy = "Simulate less: smaller images, cheaper rendering (vla-rl benchmark limit CONFIG), train.reuse."
    return _bound(run, SIMULATORS, more if run.typical("machine/cpu") < _FREE_CORES else busy)


def inference_bound(run: Recorded) -> Verdict | None:
    rows = run.typical("throughput/inference_batch")
    return _bound(
        run,
        INFERENCE,
        f"Batches have {rows:.1f} rows: raise placement.envs_per_worker and placement.max_batch, give inference more "
        "devices (vla-rl plan CONFIG), or set a longer policy.chunk_size when you clone.",
    )


def learner_bound(run: Recorded) -> Verdict | None:
    return _bound(run, LEARNER, "Raise learner.micro_batch, give it more devices (vla-rl plan CONFIG), or lower train.reuse.")


def _bound(run: Recorded, role: str, remedy: str) -> Verdict | None:
    shares = {name: run.typical(name) for name in (SIMULATORS, INFERENCE, LEARNER)}
    if shares[role] < _BUSY or shares[role] < max(shares.values()):
        return None
    return Verdict(", ".join(f"{name} {share:.0%}" for name, share in shares.items()) + ".", remedy)


def slow_env_worker(run: Recorded) -> Verdict | None:
    ratio = run.typical("throughput/slowest_worker")
    if not ratio > _SLOW:
        return None
    return Verdict(
        f"It takes {ratio:.1f} times as long for a control step as the median one.",
        "Look at its cores and its GPU: other work there, or more simulators than cores (placement.env_workers).",
    )


def evaluations_take_the_time(run: Recorded) -> Verdict | None:
    pairs = zip(run.metrics, run.metrics[1:], strict=False)
    spent = [
        after["time/seconds"] - before["time/seconds"] - after.get("time/iteration_s", 0.0)
        for before, after in pairs
        if any(name.startswith("eval/") for name in after) and {"time/seconds"} <= before.keys() & after.keys()
    ]
    total = run.last("time/seconds")
    if not spent or sum(spent) < _MUCH * total:
        return None
    return Verdict(
        f"{len(spent)} evaluations took {sum(spent) / 60:.0f} of {total / 60:.0f} minutes.",
        "Raise train.eval_every, or lower train.eval_episodes.",
    )
