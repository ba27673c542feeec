"""What a run has found out about its costs while it ran: sums of its processes' meters, and the profile they make.

    meters ──(growth, once an iteration)──▶ Costs: of the run │ since the last look ──fit──▶ Profile

Nothing is measured apart: the calls that a run makes anyway are of different sizes, and a straight line goes through
them. Only what a process computes is counted, not its waits for turns, and not its first call of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.observability.meter import LineSums
from vla_rl.placement.plan import Resources, simulator_on_devices
from vla_rl.placement.profile import Curve, Memory, Profile, load_profile

Sums = dict[str, float]  # by "group/name", name as in Meter.snapshot

# What each number of a profile is made of; of several activities the times add up.
_CURVES = {
    "simulate": "worker/simulate",
    "render": "worker/render",
    "infer": "server/act",
    "train": "learner/micro_batch",
}
_TIMES = {
    "reset": ("worker/reset",),
    "step": ("learner/step",),
    "transfer": ("learner/publish", "server/refresh"),
    "onload": ("server/offload", "learner/onload"),
    "offload": ("learner/offload", "server/onload"),
}
_HOST_LINK = 10.0  # GiB/s between a device and the host, assumed where no change of a device was ever seen
_ALIKE = 0.01  # sizes whose variance is below this share of their mean square are one size: noise would be the slope


@dataclass(slots=True)
class Costs:
    """Sums over all processes of a run; ``run`` survives checkpoints."""

    run: Sums = field(default_factory=dict)
    since: Sums = field(default_factory=dict)  # the last look

    @property
    def complete(self) -> bool:
        """Whether the run has seen enough for a profile."""
        return _complete(self.run)

    def add(self, growth: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
        """What the meters of each group's processes have grown by (``Throughput.growth``)."""
        for group in ("worker", "server", "learner"):
            for process in growth.get(group, ()):
                for name, value in process.items():
                    for sums in (self.run, self.since):
                        sums[f"{group}/{name}"] = sums.get(f"{group}/{name}", 0.0) + value

    def look(self) -> Sums | None:
        """What was measured since the last look, which begins anew; None where that is too little for a profile."""
        if not _complete(self.since):
            return None
        since, self.since = self.since, {}
        return since


def _complete(sums: Sums) -> bool:
    """Whether simulator, inference and learner were all at work."""
    return all(line_of(sums, name) for name in _CURVES.values())


def line_of(sums: Sums, activity: str) -> LineSums | None:
    """An activity's sums; None where it was never seen."""
    line = LineSums(*(sums.get(f"{activity}_{f.name}", 0.0) for f in fields(LineSums)))
    return line if line.calls > 0 and line.n > 0 else None


def fit(line: LineSums) -> Curve:
    """The straight line nearest to the calls, with neither of its numbers below 0; only ``each`` where all calls are of
    one size."""
    variance = line.calls * line.nn - line.n**2
    if variance <= _ALIKE * line.calls * line.nn:
        return Curve(each=max(0.0, line.t / line.n))
    each = (line.calls * line.nt - line.n * line.t) / variance
    fixed = (line.t - each * line.n) / line.calls
    if each < 0:
        return Curve(fixed=max(0.0, line.t / line.calls), each=0.0)
    if fixed < 0:
        return Curve(each=max(0.0, line.nt / line.nn))
    return Curve(fixed=fixed, each=each)


@dataclass(frozen=True, slots=True)
class Measured:
    """What beside its sums a run's profile needs to know."""

    run: str  # its name
    what: str  # simulator and policy
    simulator_on: Literal["cores", "devices"]
    max_episode_steps: int
    memory: Memory  # by the sizes of the policy's parameters
    configured: Profile | None  # by which the run was planned

    @classmethod
    def of(cls, run: str, config: RunConfig, spec: EnvSpec, memory: Memory) -> Measured:
        """Raises UserError where ``placement.profile`` cannot be read."""
        file, resources = config.placement.profile, Resources.of(Machine.detect(), config)
        return cls(
            run=run,
            what=f"{spec.name} and {config.policy.checkpoint or config.policy.size}",
            simulator_on="devices" if simulator_on_devices(config, resources.kind) else "cores",
            max_episode_steps=spec.max_episode_steps,
            memory=memory,
            configured=None if file is None else load_profile(Path(file)),
        )

    def profile(self, sums: Sums) -> Profile:
        """From a run's sums. What the run never did is as in the configured profile, else as ``sources`` says."""
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, activity in _CURVES.items():
            if line := line_of(sums, activity):
                values[name], sources[name] = fit(line), self._source([line])
            else:
                values[name], sources[name] = self._unseen(name, Curve(each=0.0))
        for name, activities in _TIMES.items():
            if lines := [line for activity in activities if (line := line_of(sums, activity))]:
                values[name], sources[name] = sum(x.t / x.calls for x in lines), self._source(lines)
            else:
                values[name], sources[name] = self._unseen(name, self._guess(name))
        values["mean_length"], sources["mean_length"] = self._mean_length(sums)
        memory, sources["memory"] = self._memory()
        return Profile(
            name=f"{self.what}, measured by the run {self.run}",
            simulator_on=self.simulator_on,
            **values,
            memory=memory,
            sources=sources,
        )

    def _source(self, lines: Sequence[LineSums]) -> str:
        return f"the run {self.run}, {' and '.join(f'{line.calls:.0f}' for line in lines)} calls"

    def _unseen(self, name: str, guess: Any) -> tuple[Any, str]:
        """(value, source) of what the run never did."""
        text = f"not seen in the run {self.run}"
        if self.configured is not None:
            return getattr(self.configured, name), f"{text}; as in the profile {self.configured.name!r}"
        assumed = f"{_HOST_LINK:g} GiB/s to the host assumed" if self._guess(name) else f"{guess} assumed"
        return guess, f"{text}; {assumed}"

    def _guess(self, name: str) -> float:
        """Seconds: all that a learner holds goes one way while inference's weights go the other."""
        moved = 2 * self.memory.weights + self.memory.trained
        return moved / _HOST_LINK if name in ("onload", "offload") else 0.0

    def _mean_length(self, sums: Sums) -> tuple[float, str]:
        episodes = sums.get("worker/trajectories", 0.0)
        if not episodes:
            return self._unseen("mean_length", Profile.model_fields["mean_length"].default)
        share = sums["worker/trajectory_steps"] / episodes / self.max_episode_steps
        text = f"the run {self.run}, {episodes:.0f} episodes: {share:.3f} of the limit"
        return min(1.0, max(0.5, share)), text  # bounds: what a profile can say

    def _memory(self) -> tuple[Memory, str]:
        """By sizes; activations and simulators have none that could be read."""
        text = f"sizes of parameters, gradients and moments in the run {self.run}"
        if self.configured is None:
            return self.memory, text
        rest = ("infer_each", "train_each", "simulate_fixed", "simulate_each")
        known = {name: getattr(self.configured.memory, name) for name in rest}
        return self.memory.model_copy(update=known), f"{text}; {', '.join(rest)} as in {self.configured.name!r}"
