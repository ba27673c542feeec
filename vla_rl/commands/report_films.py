"""The films of a report: of each run's first evaluation and of its newest, within the page."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vla_rl.commands.report_claims import kind_of
from vla_rl.commands.report_runs import Run, Values
from vla_rl.observability.embedded import data_uri
from vla_rl.observability.page import Clip, Section

_MOST_BYTES = 9 << 20  # of all films together; in a page they take a third more, and it stays below 15 MB


class _Film(NamedTuple):
    title: str
    file: Path
    record: Values  # of its evaluation
    age: int  # 0: of the run's newest evaluation


def film_section(runs: Sequence[Run]) -> Section:
    """Newest evaluations get their room first."""
    films = [film for run in runs for film in _of_run(run, several=len(runs) > 1)]
    kept, room = set[Path](), _MOST_BYTES
    for film in sorted(films, key=lambda film: film.age):  # stable
        if (size := film.file.stat().st_size) <= room:
            kept.add(film.file)
            room -= size
    clips = [Clip(film.title, data_uri(film.file), _told(film.record)) for film in films if film.file in kept]
    absent = [str(film.file) for film in films if film.file not in kept]
    notes = ["Episodes of the evaluations, in real time. A frame's pixels are enlarged, not smoothed."] if clips else []
    notes += [f"Too large for this page: {', '.join(absent)}."] if absent else []
    return Section("Films", notes, clips=clips)


def _of_run(run: Run, *, several: bool) -> list[_Film]:
    kind, found = kind_of([run]), list[_Film]()
    records = run.evaluations[kind]
    for age, record in zip(reversed(range(len(records))), records, strict=True):
        file = run.path / "evaluations" / f"{record['iteration']:06d}-{kind}.mp4"
        moment = f"after {record['iteration']} updates" if record["iteration"] else "before training"
        title = f"{kind.capitalize()} evaluation {moment}"
        if file.is_file():
            found.append(_Film(f"{run.name}: {title}" if several else title, file, record, age))
    return found


def _told(record: Values) -> list[str]:
    """A line for each episode; none for films of earlier versions, which did not say."""
    return [
        f"From {row['from_s']:.0f} s: {row['instruction']}. {row['verdict'].capitalize()}, after {row['steps']} steps."
        for row in record.get("filmed", ())
    ]
