"""Which process did what when: spans of a run, measured or simulated.

    Meter.time ──▶ SpanLog, in its process ──(once an iteration)──▶ RUN/trace/ROLE-INDEX.jsonl ──▶ read_trace

A file consists of parts, one for each time that spans were handed over: an empty line, a JSON object about the process
and its clock, and a JSON array for each span. What a crash has cut off is one line, which is left out.
"""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vla_rl.core.errors import UserError

MOST_SPANS = 100_000  # that wait in a process; then the oldest are lost, and counted


class Span(NamedTuple):
    """An activity of a process, between two times in seconds since the first one of the trace or the simulation."""

    role: str
    number: int  # among the processes of the role
    activity: str
    start: float
    end: float
    row: str  # of a picture: the process, or, if simulated, the resource that it used
    size: float | None = None
    node: int = 0
    thread: int = 0

    @property
    def process(self) -> str:
        return f"{self.role} {self.number}"


class Trace(NamedTuple):
    """What ``read_trace`` has found."""

    spans: list[Span]  # by start; of two that start together, the one that contains the other comes first
    begun_ns: int  # when the first one started, since 1970
    lost: int  # spans for which there was no room in their process


class SpanLog:
    """The spans of one process until they are taken. All threads may add; one takes."""

    def __init__(self, role: str, index: int, node: int) -> None:
        # when the clock of the spans began; the largest, since the process may be interrupted between two readings
        epoch_ns = max(time.time_ns() - time.perf_counter_ns() for _ in range(5))
        self._about = {"role": role, "index": index, "node": node, "epoch_ns": epoch_ns}
        self._spans: deque[tuple[str, int, int, float | None, int]] = deque(maxlen=MOST_SPANS)
        self._threads: dict[int, int] = {}  # small numbers for them
        self._lost = 0

    def add(self, activity: str, start: int, duration: int, size: float | None = None) -> None:
        """Of the calling thread. ``start``: by ``time.perf_counter_ns``; both in nanoseconds."""
        if len(self._spans) == MOST_SPANS:
            self._lost += 1
        self._spans.append((activity, start, duration, size, threading.get_ident()))

    def take(self) -> bytes:
        """What was added since the last call, as a part of the process's file; nothing if that is nothing."""
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        if not spans:
            return b""
        lost, self._lost = self._lost, 0
        lines = ["", json.dumps(self._about | {"lost": lost})]
        names = {activity: json.dumps(activity) for activity in {span[0] for span in spans}}
        for activity, start, duration, size, thread in spans:
            number = self._threads.setdefault(thread, len(self._threads))
            shown = "null" if size is None else float(size)
            lines.append(f"[{names[activity]}, {start}, {duration}, {shown}, {number}]")  # faster than json.dumps
        return ("\n".join(lines) + "\n").encode()


def read_trace(folder: Path) -> Trace:
    """All spans of a run, on one clock. ``folder``: ``RUN/trace``. Raises UserError if there are none."""
    found: list[tuple[int, int, dict[str, Any], str, float | None, int]] = []
    lost = 0
    for file in sorted(folder.glob("*.jsonl")):
        about: dict[str, Any] | None = None
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
            match _record(line):
                case {"role": _, "index": _, "node": _, "epoch_ns": int(), "lost": int()} as about:
                    lost += about["lost"]
                case [str(activity), int(start), int(duration), size, int(thread)] if about is not None:
                    start += about["epoch_ns"]
                    found.append((start, start + duration, about, activity, size, thread))
                case _:  # between two parts, or cut off
                    about = None
    if not found:
        raise UserError(f"{folder} holds no spans: train with log.trace=true, and let an iteration end")
    begun = min(start for start, *_ in found)
    spans = [
        Span(
            role=about["role"],
            number=about["index"],
            activity=activity,
            start=(start - begun) * 1e-9,
            end=(end - begun) * 1e-9,
            row=f"{about['role']} {about['index']}",
            size=size,
            node=about["node"],
            thread=thread,
        )
        for start, end, about, activity, size, thread in found
    ]
    return Trace(sorted(spans, key=lambda span: (span.start, -span.end)), begun, lost)


def _record(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace event format of Chrome, which Perfetto reads, too: microseconds since the first span."""
    nodes = {(s.role, s.number): s.node for s in trace.spans}
    numbers = {process: number for number, process in enumerate(sorted(nodes), 1)}
    events: list[dict[str, Any]] = []
    for (role, index), number in numbers.items():
        about = {"ph": "M", "pid": number}
        events.append(about | {"name": "process_name", "args": {"name": f"{role} {index}, node {nodes[role, index]}"}})
        events.append(about | {"name": "process_sort_index", "args": {"sort_index": number}})
    tracks = _tracks(trace.spans)
    for span in trace.spans:
        start, end = round(span.start * 1e9), round(span.end * 1e9)
        event = {
            "ph": "X",
            "name": span.activity,
            "cat": span.role,
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "pid": numbers[span.role, span.number],
            "tid": tracks[span.process, span.thread],
        }
        events.append(event if span.size is None else event | {"args": {"size": span.size}})
    about_run = {"begun_unix_ns": trace.begun_ns, "lost_spans": trace.lost}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about_run}


def _tracks(spans: Iterable[Span]) -> dict[tuple[str, int], int]:
    """The track of each (process, thread), from 1 on; no two processes share one.

    Threads of a process that never work at the same time, such as those of a pool, do.
    """
    outer: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)  # without the spans inside
    for span in spans:
        mine = outer[span.process, span.thread]
        if not mine or span.start >= mine[-1][1]:
            mine.append((span.start, span.end))
    taken: defaultdict[str, dict[int, list[tuple[float, float]]]] = defaultdict(dict)
    found: dict[tuple[str, int], int] = {}
    for (process, thread), mine in sorted(outer.items()):
        free = (track for track, others in taken[process].items() if _apart(sorted(others + mine)))
        track = next(free, max(found.values(), default=0) + 1)
        taken[process].setdefault(track, []).extend(mine)
        found[process, thread] = track
    return found


def _apart(intervals: Sequence[tuple[float, float]]) -> bool:
    return all(end <= start for (_, end), (start, _) in pairwise(intervals))
