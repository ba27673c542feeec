"""`vla-rl report RUN [RUN …]`: what came out of runs, and why, as one page of HTML.

run folders ──▶ runs ──▶ groups: all but the seed is equal ──▶ claims, facts, sections ──▶ page.html
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.commands.loggers import guarded
from vla_rl.commands.report_claims import claims, facts
from vla_rl.commands.report_runs import grouped, read_run
from vla_rl.commands.report_sections import sections
from vla_rl.commands.run_folder import RunFolder
from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.observability.page import render_page

FILE = "report.html"


def report_command(args: Any) -> int:
    """Write the page, and print its path."""
    print(write_report(args.runs, args.output))
    return 0


def write_report(paths: Sequence[Path], output: Path | None = None) -> Path:
    """The report of one run, or of several in comparison; returns its file.

    ``paths``: run folders, also of runs that are running, or copies of a ``metrics.jsonl``. ``output``: None stands
    for ``report.html`` in the folder of the one run, or else in the working directory. Raises UserError if there is
    nothing to report, or the file cannot be written.
    """
    if not paths:
        raise UserError("no run is given: name a run folder (below runs/) or its metrics.jsonl")
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two runs have the name {twice[0]!r}: rename one, names are the labels")
    output = output or (paths[0] / FILE if len(runs) == 1 and paths[0].is_dir() else Path(FILE))
    groups = grouped(runs)
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs, {len(groups)} configs"
    page = render_page(title, claims(groups), facts(runs), sections(groups))
    try:
        with replacing(output) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error}); name another file with --output") from error
    return output


def report_at_end(folder: RunFolder) -> None:
    """Write the report of a run that has ended, and has let go of its folder, and say so.

    A failure is said, and is none of the run's.
    """
    with guarded(FILE):
        if folder.has_begun and not folder.temporary and folder.metrics():
            print(f"report: {write_report([folder.path])}", flush=True)
