"""What each process did when: from a process's meter to its file, and from there to `vla-rl trace`."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ROOT
from vla_rl.commands.cli import main
from vla_rl.config.loading import dump_config, load_config
from vla_rl.observability import meter as meter_module
from vla_rl.observability import plots, spans
from vla_rl.observability.meter import Meter
from vla_rl.observability.spans import Span, SpanLog, chrome_trace, read_trace


def work(meter: Meter) -> None:
    """Nested activities, some with a size, one of which is known only at its end."""
    for size in (1, 3, 2):
        with meter.time("infer"):
            with meter.time("act", size):
                pass
            with meter.time("simulate") as call:
                call.size = size / 2


def test_a_meter_has_the_same_sums_with_spans_and_the_spans_have_them_too(tmp_path, monkeypatch):
    clocks = [iter(range(0, 10**9, 1000)) for _ in range(2)]  # of equal ticks

    def measured(clock: Iterator[int], log: SpanLog | None) -> dict[str, float]:
        ticking = {"perf_counter_ns": lambda: next(clock), "process_time": lambda: 0.0}
        monkeypatch.setattr(meter_module, "time", SimpleNamespace(**ticking))
        meter = Meter(spans=log)
        work(meter)
        return meter.snapshot()

    log = SpanLog("env worker", 0, 0)
    with_spans = measured(clocks[0], log)
    assert with_spans == measured(clocks[1], None)
    (tmp_path / "a.jsonl").write_bytes(log.take())
    found = read_trace(tmp_path).spans
    for activity in ("infer", "act", "simulate"):
        total = sum(span.end - span.start for span in found if span.activity == activity)
        assert total == pytest.approx(with_spans[f"{activity}_s"])
    assert [span.size for span in found if span.activity == "simulate"] == [0.5, 1.5, 1.0]


def test_spans_of_a_thread_follow_each_other_or_lie_within_each_other(tmp_path):
    log = SpanLog("world model", 0, 0)
    ready = threading.Barrier(3)

    def run() -> None:
        ready.wait(5.0)
        for _ in range(50):
            work(Meter(spans=log))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = log.take()
    assert not log.take(), "taken once"
    assert len(lines) / 1350 < 80, "bytes of a span"
    (tmp_path / "a.jsonl").write_bytes(lines)
    found = read_trace(tmp_path).spans
    assert len(found) == 3 * 50 * 9
    for thread in range(3):
        inside: list[Span] = []
        for span in (span for span in found if span.thread == thread):
            while inside and inside[-1].end <= span.start:
                inside.pop()
            assert not inside or span.end <= inside[-1].end
            inside.append(span)


def part(role: str, index: int, epoch_ns: int, *records: tuple) -> str:
    about = {"role": role, "index": index, "node": index, "epoch_ns": epoch_ns, "lost": 0}
    return "\n" + "".join(json.dumps(line) + "\n" for line in (about, *map(list, records)))


S = 10**9
EPOCH = 1_700_000_000 * S


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two processes whose clocks began at different times; the second one's ten seconds earlier."""
    folder = tmp_path / "run"
    (folder / "trace").mkdir(parents=True)
    server = part("inference server", 0, EPOCH, ("act", 101 * S, S, 4.0, 0), ("infer", 100 * S, 3 * S, None, 0))
    (folder / "trace/inference-server-0.jsonl").write_text(server)
    worker = part("env worker", 1, EPOCH - 10 * S, ("wait", 110 * S, 2 * S, None, 0), ("simulate", 112 * S, S, 2.0, 1))
    later = ("render", 113 * S + 500, S, 1.0, 2), ("lease", 113 * S, S, None, 3)
    worker += part("env worker", 1, EPOCH - 10 * S, *later)
    (folder / "trace/env-worker-1.jsonl").write_text(worker)
    return folder


def test_a_trace_for_perfetto_has_all_processes_on_one_clock(run):
    events = chrome_trace(read_trace(run / "trace"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["env worker 1, node 1", "inference server 0, node 0"]
    timed = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    assert all({"name", "cat", "ts", "dur", "pid", "tid"} <= event.keys() for event in timed)
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(timed))
    times = {event["name"]: (event["ts"], event["dur"]) for event in timed}
    assert times == {
        "infer": (0.0, 3e6),
        "wait": (0.0, 2e6),
        "act": (1e6, 1e6),
        "simulate": (2e6, 1e6),
        "lease": (3e6, 1e6),
        "render": (3e6 + 0.5, 1e6),
    }
    assert {event["name"]: event["args"]["size"] for event in timed if "args" in event} == {
        "act": 4.0,
        "simulate": 2.0,
        "render": 1.0,
    }
    tracks = {event["name"]: event["tid"] for event in timed if names[event["pid"]].startswith("env worker")}
    assert tracks["wait"] == tracks["simulate"], "threads that take turns share a row"
    assert tracks["lease"] != tracks["render"], "others do not"


def test_a_file_that_was_cut_off_is_read_up_to_the_cut_and_after_it(tmp_path):
    records = [("act", i * S, 7, None, 0) for i in range(3)]
    whole = part("learner", 0, EPOCH, *records)
    header = len(part("learner", 0, EPOCH))
    file = tmp_path / "learner-0.jsonl"
    for cut in range(header + 2, len(whole)):
        complete = whole[:cut].count("]")
        file.write_text(whole[:cut])
        if complete:
            assert [span.activity for span in read_trace(tmp_path).spans] == ["act"] * complete
        file.write_text(whole[:cut] + part("learner", 0, EPOCH, ("step", 9 * S, 7, None, 0)))
        assert [span.activity for span in read_trace(tmp_path).spans] == [*["act"] * complete, "step"]


def test_of_too_many_spans_the_oldest_are_lost_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "MOST_SPANS", 3)
    log = SpanLog("learner", 0, 0)
    for number in range(5):
        log.add(f"step {number}", number, 1)
    (tmp_path / "learner-0.jsonl").write_bytes(log.take())
    trace = read_trace(tmp_path)
    assert ([span.activity for span in trace.spans], trace.lost) == (["step 2", "step 3", "step 4"], 2)


def test_the_command_writes_both_and_draws_the_forecast_above(run, tmp_path, monkeypatch, capsys):
    rows = []
    plotted = plots.figure

    @contextmanager
    def spied(*arguments, **options):
        with plotted(*arguments, **options) as axis:
            yield axis
            rows.append([label.get_text() for label in axis.get_yticklabels()])

    monkeypatch.setattr(plots, "figure", spied)
    profile = ROOT / "configs/profiles/libero_openvla_oft_h100.yaml"
    for keys in (["env=workload"], ["env=workload", f"placement.profile={profile}"]):
        (run / "config.yaml").write_text(dump_config(load_config(None, keys)))
        written, picture = tmp_path / "trace.json.gz", tmp_path / "picture.svg"
        assert main(["trace", str(run), "--output", str(written), "--picture", str(picture), "--seconds", "2.5"]) == 0
        assert json.loads(gzip.decompress(written.read_bytes()))["otherData"]["begun_unix_ns"] == EPOCH + 100 * S
        assert b"<svg" in picture.read_bytes()
    assert rows[0] == ["env worker 1", "inference server 0"]
    *expected, worker, server = rows[1]
    assert [worker, server] == rows[0]
    assert expected
    assert all(row.startswith("forecast: ") for row in expected)
    assert "no forecast" not in capsys.readouterr().out


def test_a_run_without_a_trace_is_one_clear_error(tmp_path, capsys):
    assert main(["trace", str(tmp_path), "--output", str(tmp_path / "trace.json")]) == 2
    assert "train with log.trace=true" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()
