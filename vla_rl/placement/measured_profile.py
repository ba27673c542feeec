"""The costs that a run measures while it runs, and the profile that follows from them.

    meters ──(growth, every iteration)──▶ MeasuredCosts: sums over calls ──(straight lines)──▶ Profile

Nothing is measured separately: the calls that a run makes anyway differ in size, and a straight line is fitted to them.
Only computing counts: no waits for device leases, and not a process's first call of a kind, which loads and allocates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Machine
from vla_rl.core.records import EnvSpec
from vla_rl.observability.meter import LineSums
from vla_rl.placement.layouts import simulator_on_devices
from vla_rl.placement.profile import CURVES, LinearCost, Memory, Profile, load_profile
from vla_rl.placement.resources import Resources

# The activities behind each number of a profile; the mean times of several add up.
_ACTIVITIES = {
    "simulate": ["worker/simulate"],
    "render": ["worker/render"],
    "infer": ["server/act"],
    "train": ["learner/micro_batch"],
    "critic": ["learner/critic_step"],
    "imagine": ["world_model/imagine"],
    "model_train": ["world_model/model_train"],
    "reset": ["worker/reset"],
    "step": ["learner/step"],
    "weight_sync": ["learner/publish", "server/refresh"],
    "onload": ["server/offload", "learner/onload"],
    "offload": ["learner/offload", "server/onload"],
}
_HOST_LINK = 10.0  # GiB/s between a device and the host, assumed if the run never offloaded
_ALIKE = 0.01  # if the variance of sizes is below this share of their mean square, a slope would be noise


@dataclass(slots=True)
class MeasuredCosts:
    """Sums over the calls of all processes, by "group/name" with the names of ``Meter.snapshot``."""

    sums: dict[str, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether simulator, inference and learner have all been seen at work."""
        return all(self.line(_ACTIVITIES[name][0]) for name in ("simulate", "render", "infer", "train"))

    def add(self, growth: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
        """Add what the meters of each group's processes have grown by (``Throughput.growth``)."""
        for group in ("worker", "server", "learner", "world_model"):
            for process in growth.get(group, ()):
                for name, value in process.items():
                    self.sums[f"{group}/{name}"] = self.sums.get(f"{group}/{name}", 0.0) + value

    def line(self, activity: str) -> LineSums | None:
        """An activity's sums; None if it was never seen."""
        line = LineSums(*(self.sums.get(f"{activity}_{f.name}", 0.0) for f in fields(LineSums)))
        return line if line.calls > 0 and line.n > 0 else None


def fit_line(line: LineSums) -> LinearCost:
    """Least-squares line through the calls, with both numbers at least 0; only ``each`` if all sizes are alike."""
    variance = line.calls * line.nn - line.n**2
    if variance <= _ALIKE * line.calls * line.nn:
        return LinearCost(each=max(0.0, line.t / line.n))
    each = (line.calls * line.nt - line.n * line.t) / variance
    fixed = (line.t - each * line.n) / line.calls
    if each < 0:
        return LinearCost(fixed=max(0.0, line.t / line.calls), each=0.0)
    if fixed < 0:
        return LinearCost(each=max(0.0, line.nt / line.nn))
    return LinearCost(fixed=fixed, each=each)


class ProfileBuilder:
    """Turns a run's measured costs into a profile whose ``sources`` tell measured from assumed numbers.

    ``run``: its name, for the sources. ``memory``: of the policy (``expected_memory``).
    Raises UserError if ``placement.profile`` cannot be read.
    """

    def __init__(self, config: RunConfig, spec: EnvSpec, run: str, memory: Memory) -> None:
        file, resources = config.placement.profile, Resources.of(Machine.detect(), config)
        self._run, self._memory, self._max_episode_steps = f"the run {run}", memory, spec.max_episode_steps
        policy = config.policy.checkpoint or config.policy.size_name
        self._about: dict[str, Any] = {
            "name": f"{spec.name} and {policy}, measured by {self._run}",
            "simulator_on": "devices" if simulator_on_devices(config, resources.kind) else "cores",
        }
        self._configured = None if file is None else load_profile(Path(file))

    def profile(self, costs: MeasuredCosts) -> Profile:
        """What the run never did is taken from ``placement.profile``, or assumed."""
        found = {name: self._cost(name, costs) for name in _ACTIVITIES}
        found |= {"mean_length": self._mean_length(costs), "memory": self._memory_by_sizes()}
        values = {name: value for name, (value, _) in found.items()}
        return Profile(**self._about, **values, sources={name: source for name, (_, source) in found.items()})

    def _cost(self, name: str, costs: MeasuredCosts) -> tuple[Any, str]:
        """(value, source) of a cost."""
        lines = [line for activity in _ACTIVITIES[name] if (line := costs.line(activity))]
        if not lines:
            return self._unseen(name)
        source = f"{self._run}, {' and '.join(f'{line.calls:.0f}' for line in lines)} calls"
        return fit_line(lines[0]) if name in CURVES else sum(x.t / x.calls for x in lines), source

    def _unseen(self, name: str) -> tuple[Any, str]:
        """(value, source) of what the run never did."""
        text = f"not seen in {self._run}"
        if self._configured is not None:
            return getattr(self._configured, name), f"{text}; as in the profile {self._configured.name!r}"
        if name in ("onload", "offload"):  # all of the learner's memory moves one way, inference's weights the other
            seconds = (2 * self._memory.weights + self._memory.trained) / _HOST_LINK
            return seconds, f"{text}; {_HOST_LINK:g} GiB/s to the host assumed"
        default = Profile.model_fields["mean_length"].default if name == "mean_length" else 0.0
        value = LinearCost(each=0.0) if name in CURVES else default
        return value, f"{text}; {value} assumed"

    def _mean_length(self, costs: MeasuredCosts) -> tuple[float, str]:
        episodes = costs.sums.get("worker/trajectories", 0.0)
        if not episodes:
            return self._unseen("mean_length")
        share = costs.sums["worker/trajectory_steps"] / episodes / self._max_episode_steps
        text = f"{self._run}, {episodes:.0f} episodes: {share:.3f} of the limit"
        return min(1.0, max(0.5, share)), text  # the range that a profile allows

    def _memory_by_sizes(self) -> tuple[Memory, str]:
        """The memory of a simulator on devices cannot be measured: it is as configured, or 0."""
        text = f"sizes of weights, gradients, moments and activations in {self._run}"
        if self._configured is None:
            return self._memory, text
        rest = ("simulate_fixed", "simulate_each", "draw_each")
        known = {name: getattr(self._configured.memory, name) for name in rest}
        return self._memory.model_copy(update=known), f"{text}; {', '.join(rest)} as in {self._configured.name!r}"
