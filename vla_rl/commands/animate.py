"""`vla-rl plot RUN --animate FILE`: a run as an animation, for a page that shows what it has learned."""

from typing import Any

from vla_rl.commands.report_claims import kind_of, moment
from vla_rl.commands.report_runs import Run, read_run
from vla_rl.core.errors import UserError
from vla_rl.observability.animation import Film, draw_animation
from vla_rl.observability.plots import recorded_effort


def animate_command(args: Any) -> int:
    """Write the animation, and print its path and size. Raises UserError."""
    if len(args.runs) > 1:
        raise UserError(f"--animate shows one run, and {len(args.runs)} are named: name one")
    run = read_run(args.runs[0])
    over, films = recorded_effort(args.x, {run.name: run.metrics}), evaluation_films(run)
    title = run.title + (" (placeholder assets)" if run.about.get("assets") == "placeholder" else "")
    size = draw_animation(films, run.metrics, args.animate, title, over, 1000 * args.kilobytes)
    print(f"{args.animate} ({size / 1000:.0f} kB)")
    return 0


def evaluation_films(run: Run) -> tuple[Film, Film]:
    """Those of the first and of the last evaluation that was filmed. Raises UserError if there are not two.

    A film without a record in the metrics is none of the run: it was resumed from before.
    """
    kind = kind_of([run])
    measured = {int(m["iteration"]): m for m in run.metrics if f"eval/{kind}_success" in m}
    paths = {
        iteration: path
        for path in sorted((run.path / "evaluations").glob(f"[0-9]*-{kind}.mp4"))
        if (iteration := int(path.stem.partition("-")[0])) in measured
    }
    if len(paths) < 2:
        raise UserError(
            f"{run.path / 'evaluations'} has films of {len(paths)} evaluations, and two are needed: name the folder of "
            "a run that was evaluated twice or more (train.eval_every) and filmed it (log.video)"
        )
    chosen = [(measured[iteration], paths[iteration]) for iteration in (min(paths), max(paths))]
    films = [Film(path, f"{moment(m)}: {m[f'eval/{kind}_success']:.0%} succeed") for m, path in chosen]
    return films[0], films[1]
