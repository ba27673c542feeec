"""`vla-rl why`: what is wrong with a run and what to do, from what it has recorded."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vla_rl.core.files import write_json
from vla_rl.observability.console import make_console
from vla_rl.observability.why import Recorded, findings, judge, not_judged

_FEW = 3  # findings at the end of a run


def why_command(args: Any) -> int:
    """Print the findings, and what could not be judged. Returns 1 if something is wrong; slowness is not."""
    run = Recorded.of(args.run)
    found, skipped = judge(run), not_judged(run)
    wrong = [finding for finding in found if finding.kind != "speed"]
    lines = [f"{args.run}: {run.last('iteration'):.0f} updates, success {run.success_now:.0%}"]
    if not wrong:
        lines.append("Nothing that is known looks wrong in what it has recorded.")
    for number, finding in enumerate(found, 1):
        evidence, remedy = finding.lines()
        lines += [f"{number}. {evidence}", f"   {remedy}"]
    if skipped:
        lines.append("Not judged, since the run has not recorded it:")
        lines += [f"  {name}: {', '.join(needs).replace('|', ' or ')}" for name, needs in skipped.items()]
    console = make_console()
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if args.json is not None:
        write_json(args.json, {"findings": [asdict(finding) for finding in found], "not_judged": skipped})
    return int(bool(wrong))


def last_words(run: Path) -> Iterator[str]:
    """What the end of a run says of it: the first findings, two lines each."""
    for finding in findings(run)[:_FEW]:
        evidence, remedy = finding.lines()
        yield f"why: {evidence}"
        yield f"     {remedy}"
