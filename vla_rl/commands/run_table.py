"""`vla-rl plot RUN ... --table`: runs as rows of a table for a paper or a page."""

from collections.abc import Mapping, Sequence

from vla_rl.observability.plots import Metrics

_SUCCESS = ("greedy, before", "greedy, after", "sampled, before", "sampled, after")  # in per cent
_COLUMNS = ("run", "updates", "episodes", "minutes", *_SUCCESS)
_LATEX = {"\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#"}


def run_table(runs: Mapping[str, Metrics], form: str) -> str:
    """Updates, episodes, minutes, and success in per cent with its 95 % interval. ``form``: "markdown" or "latex"."""
    rows = [(name, *_figures(metrics)) for name, metrics in runs.items()]
    if form == "latex":
        lines = [[_escaped(cell) for cell in row] for row in (_COLUMNS, *rows)]
        head, *body = (" & ".join(line) + r" \\" for line in lines)
        begin = rf"\begin{{tabular}}{{l{'r' * (len(_COLUMNS) - 1)}}}"
        return "\n".join([begin, r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}"])
    rule = ["---", *["---:"] * (len(_COLUMNS) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (_COLUMNS, rule, *rows))


def _figures(metrics: Metrics) -> Sequence[str]:
    last = metrics[-1]
    episodes = f"{last['episodes/trained']:,.0f}" if "episodes/trained" in last else ""
    minutes = f"{last['time/seconds'] / 60:.1f}" if "time/seconds" in last else ""
    found = [f"{last['iteration']:.0f}", episodes, minutes]
    for kind in ("greedy", "sampled"):
        evaluated = [m for m in metrics if f"eval/{kind}_success" in m]
        found += [_rate(m, kind) for m in (evaluated[0], evaluated[-1])] if evaluated else ["", ""]
    return found


def _rate(metrics: Mapping[str, float], kind: str) -> str:
    rate = f"{100 * metrics[f'eval/{kind}_success']:.0f}"
    bounds = [metrics.get(f"eval/{kind}_{bound}95") for bound in ("low", "high")]
    low, high = (None if bound is None else f"{100 * bound:.0f}" for bound in bounds)
    return rate if low is None or high is None else f"{rate} ({low} to {high})"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
