"""`vla-rl profile`: trains a few iterations in a temporary folder, and keeps the profile that this run measures.

The run is the configured one, without evaluations, with a plan that is chosen by rule. Its costs come from its own
calls (``vla_rl.placement.measured_profile``), so the profile covers what the run does:

- Inference and learner leave a device to each other only with ``placement.offload=always``. Without it, ``onload`` and
  ``offload`` are assumed: the policy's weights at 10 GiB/s between device and host.
- If all calls of an activity have about one size, its ``fixed`` part is 0.
- Memory follows from the sizes of the policy's weights. Activations and simulators on devices count as 0.

The profile's ``sources``, the last column of the table, say what was measured and what was assumed.
"""

from typing import Any

from rich.table import Table

from vla_rl.commands.short_run import short_run
from vla_rl.config.run_config import RunConfig
from vla_rl.observability.console import make_console
from vla_rl.placement.checks import load_checked_config
from vla_rl.placement.profile import CURVES, TIMES, Profile, load_profile, save_profile


def profile_command(args: Any) -> int:
    """Measure, show and save."""
    profile = measure_profile(load_checked_config(args.config, args.overrides))
    table, console = Table(title=profile.name), make_console()
    for name in ("activity", "fixed", "each", "source"):
        table.add_column(name, justify="right" if name in ("fixed", "each") else "left")
    for name in CURVES:
        cost = getattr(profile, name)
        table.add_row(name, _milliseconds(cost.fixed), _milliseconds(cost.each), profile.sources[name])
    for name in TIMES:
        table.add_row(name, _milliseconds(getattr(profile, name)), "", profile.sources[name])
    console.print(table)
    save_profile(profile, args.output)
    console.print(f"{args.output}: use it with placement.profile={args.output}, or in vla-rl plan")
    return 0


def measure_profile(config: RunConfig) -> Profile:
    """The profile of a short run. Raises as ``short_run``."""
    planned_by_rule = config.with_values(
        {"train.publish_every": 1, "placement.profile": None, "placement.replan_every": 0}
    )
    # The first call of each process does not count, and during the last updates no further episode is played.
    with short_run(planned_by_rule, config.max_staleness + 4) as run:
        return load_profile(run / "profile.yaml")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
