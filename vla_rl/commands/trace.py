"""`vla-rl trace`: what each process of a run did when, for Perfetto and as a picture."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.observability.plots import draw_timeline
from vla_rl.observability.spans import Span, Trace, chrome_trace, read_trace


def trace_command(args: Any) -> int:
    """Write the trace of a run with ``log.trace``, and draw the end of it if that is wanted."""
    trace = read_trace(args.run / "trace")
    if trace.lost:
        print(f"{trace.lost} of the oldest spans are missing: an iteration had more than a process keeps")
    _write(trace, args.output)
    print(f"{args.output}: open it at ui.perfetto.dev, or in Chrome at chrome://tracing")
    if args.picture is not None:
        measured = last_seconds(trace.spans, args.seconds)
        start = measured[0].start
        expected = _forecast(args.run, start, args.seconds)
        shown = max(span.end for span in measured) - start
        title = f"{args.run.name}: the last {shown:.0f} seconds"
        draw_timeline([expected, measured] if expected else [measured], args.picture, title)
        print(args.picture)
    return 0


def _write(trace: Trace, path: Path) -> None:
    with replacing(path) as partial:
        text = json.dumps(chrome_trace(trace), separators=(",", ":")).encode()
        partial.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def last_seconds(spans: Sequence[Span], seconds: float) -> list[Span]:
    """The end of a run, by start; of spans that began before, the rest."""
    first = max(span.end for span in spans) - seconds
    cut = [span._replace(start=max(first, span.start)) for span in spans if span.end > first]
    return sorted(cut, key=lambda span: (span.start, -span.end))


def _forecast(run: Path, start: float, seconds: float) -> list[Span]:
    """What the planner expects of the run, from ``start`` on; nothing without a profile, or if none fits this machine.

    Two super-batches, or as much of them as fits into ``seconds``.
    """
    from envs import env_spec
    from vla_rl.config.loading import load_config
    from vla_rl.core.machine import Machine
    from vla_rl.placement.planner import profile_of, search_by_profile, workload_of
    from vla_rl.placement.resources import Resources
    from vla_rl.placement.simulation import forecast

    if not (run / "config.yaml").is_file():
        return []
    try:
        config = load_config(run / "config.yaml")
        if config.placement.profile is None:
            return []
        spec, machine = env_spec(config.env), Machine.detect()
        plan = search_by_profile(config, spec, machine, Resources.of(machine, config))[0].plan
        profile = profile_of(config, spec, machine)
    except UserError as error:
        print(f"no forecast beside it: {error}")
        return []
    workload = workload_of(config, spec, profile)
    scale = 1.0 if config.placement.virtual is None else config.placement.time_scale
    spans = forecast(plan, profile.scaled(scale), workload)
    begun = min(span.start for span in spans)
    return [
        span._replace(
            row=f"forecast: {span.row}",
            start=span.start - begun + start,
            end=min(span.end - begun, seconds) + start,
        )
        for span in spans
        if span.start - begun < seconds
    ]
