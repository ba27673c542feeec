"""Throughput, busy shares and memory of a run, from the meters of its processes."""

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

import psutil

Totals = dict[str, float]
_OFFLOAD = ("onload_s", "offload_s")
_PLAYING = ("simulate_s", "render_s", "reset_s")  # what an env worker does


class ProcessorTime:
    """Seconds for which cores have worked for this process and its descendants on this machine."""

    def __init__(self) -> None:
        self._before = self._of_processes()

    def growth(self) -> float:
        """Since the last call. What a process did between the last call and its end is not known, and left out."""
        now = self._of_processes()
        growth = sum(seconds - self._before.get(process, 0.0) for process, seconds in now.items())
        self._before = now
        return growth

    @staticmethod
    def _of_processes() -> dict[psutil.Process, float]:
        root, found = psutil.Process(), {}
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
                times = process.cpu_times()
                found[process] = times.user + times.system
        return found


@dataclass(slots=True)
class Throughput:
    """Rates since the previous measurement; call ``measure`` once per iteration."""

    _since: float = field(default_factory=time.monotonic)
    _processors: ProcessorTime = field(default_factory=ProcessorTime)
    _before: dict[str, Mapping[int, Totals]] = field(default_factory=dict)
    growth: dict[str, list[Totals]] = field(default_factory=dict)  # of each process, in the last measurement

    def measure(self, stats: Mapping[str, Mapping[int, Totals]]) -> dict[str, float]:
        """Metrics by name.

        ``stats``: meter totals of each process that is there, by its index, in groups (worker, server, learner, relay,
        gateway, world_model, device).
        """
        now = time.monotonic()
        wall, self._since = now - self._since, now
        growth = self.growth = {group: self._growth(group, totals) for group, totals in stats.items()}
        workers, servers, learners = (growth.get(g, []) for g in ("worker", "server", "learner"))
        batches, rows = _total(servers, "batches"), _total(servers, "rows")
        return {
            "throughput/env_steps_per_s": _total(workers, "env_steps") / wall,
            "throughput/chunks_per_s": _total(workers, "chunks") / wall,
            "throughput/batches_per_s": 1.0 / wall,
            "throughput/episodes_per_s": _total(workers, "episodes") / wall,
            "throughput/inference_batch": rows / batches if batches else 0.0,
            "busy/env_workers": _share(workers, _PLAYING, wall),
            "busy/simulate": _share(workers, ("simulate_s",), wall),
            "busy/render": _share(workers, ("render_s",), wall),
            "busy/reset": _share(workers, ("reset_s",), wall),
            "busy/inference": _share(servers, ("infer_s",), wall),
            "busy/learner": _share(learners, ("train_s", "publish_s"), wall),
            "cpu/env_workers_s": _total(workers, "cpu_s"),
            "cpu/inference_s": _total(servers, "cpu_s"),
            "cpu/learner_s": _total(learners, "cpu_s"),
            "time/iteration_s": wall,
            "time/iteration_cpu_s": self._processors.growth(),
            **_of_actions(workers),
            **_of_slowest(workers),
            **_of_network(growth.get("relay", []), growth.get("gateway", []), wall),
            **_of_world_model(growth.get("world_model", []), wall),
            **({"busy/shared_devices": _share(growth["device"], ("held_s",), wall)} if growth.get("device") else {}),
            **({"busy/learner_offload": _share(learners, _OFFLOAD, wall)} if _total(learners, "offload_s") else {}),
        }

    def _growth(self, group: str, totals: Mapping[int, Totals]) -> list[Totals]:
        before, self._before[group] = self._before.get(group, {}), totals
        return [_difference(grown, before.get(index, {})) for index, grown in totals.items()]


def _of_world_model(models: Sequence[Totals], wall: float) -> dict[str, float]:
    if not models:
        return {}
    return {
        "throughput/imagined_per_s": _total(models, "imagined") / wall,
        "busy/imagine": _share(models, ("imagine_s", "frames_s"), wall),
        "busy/model_train": _share(models, ("model_train_s", "frame_train_s"), wall),
    }


def _of_network(relays: Sequence[Totals], gateways: Sequence[Totals], wall: float) -> dict[str, float]:
    """Of requests between nodes; no latency where none was answered."""
    if not relays:
        return {}
    answered = _total(relays, "network_rows")
    found = {"network/latency_ms": 1e3 * _total(relays, "network_s") / answered} if answered else {}
    return found | {
        "network/mib_per_s": _total(relays, "network_bytes") / 2**20 / wall,
        "network/repeated": _total(relays, "network_repeated"),
        "network/dropped": _total([*relays, *gateways], "dropped"),
    }


def _of_actions(workers: Sequence[Totals]) -> dict[str, float]:
    """As ``rollout.action_use`` counts them; nothing where no number was executed."""
    numbers, still = _total(workers, "action_numbers"), _total(workers, "numbers_in_middle")
    found = {"rollout/action_middle": still / numbers} if numbers else {}
    if numbers > still:  # tasks leave some numbers unused, which would hide that the others are saturated
        found["rollout/action_saturation"] = _total(workers, "numbers_at_limits") / (numbers - still)
    return found


def _of_slowest(workers: Sequence[Totals]) -> dict[str, float]:
    """Seconds a control step takes in the slowest worker, as a multiple of the median one's; of two, the faster is."""
    spent = ((sum(w.get(name, 0.0) for name in _PLAYING), w.get("env_steps", 0.0)) for w in workers)
    costs = [seconds / steps for seconds, steps in spent if seconds and steps]
    return {"throughput/slowest_worker": max(costs) / median_low(costs)} if len(costs) > 1 else {}


def _difference(totals: Totals, before: Totals) -> Totals:
    """The growth; all of the totals if a restarted process counts from zero again."""
    if any(totals.get(name, 0.0) < value for name, value in before.items()):
        return dict(totals)
    return {name: value - before.get(name, 0.0) for name, value in totals.items()}


def _total(processes: Sequence[Totals], name: str) -> float:
    return sum(p.get(name, 0.0) for p in processes)


def _share(processes: Sequence[Totals], names: Sequence[str], wall: float) -> float:
    """Mean share of the time that the processes spent on these activities."""
    if not processes:
        return 0.0
    return sum(_total(processes, name) for name in names) / (wall * len(processes))


def resident_gib() -> float:
    """Memory of this process and all of its descendants on this machine, in GiB, at no cost.

    Pages that processes share (shared memory, libraries) count once, by the process that has most of them. The
    proportional sizes that Linux can compute would divide them exactly, and take 0.1 s for each mapped GiB.
    """
    private, shared = 0, 0
    root = psutil.Process()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            info = process.memory_info()
            of_others = getattr(info, "shared", 0)
            private += info.rss - of_others
            shared = max(shared, of_others)
    return (private + shared) / 2**30


def swapped_gib() -> float:
    """What the kernel has moved of this process and its descendants on this machine to disk, in GiB; Linux only."""
    kib = 0
    for process in [root := psutil.Process(), *root.children(recursive=True)]:
        with contextlib.suppress(OSError):  # it has ended, or /proc is missing
            found = re.search(r"VmSwap:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            kib += int(found[1]) if found else 0
    return kib / 2**20
