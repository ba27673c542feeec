"""What TensorBoard and Weights & Biases get, read back from their files; and the page that explains it."""

import ast
import json
import re
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from envs import env_spec
from envs.tabletop.config import TabletopConfig
from tests import ROOT
from tests.metrics_page import PAGE, documented, undocumented
from tests.runtime_fakes import limited_files, result
from vla_rl.commands import loggers
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.observability.metrics_file import read_records
from vla_rl.observability.success_rate import Evaluation
from vla_rl.placement import checks
from vla_rl.placement.checks import load_checked_config
from vla_rl.replay.schedule import evaluation_episodes

SPEC = replace(env_spec(TabletopConfig()), instructions=("do 0", "do 1"))


def evaluation(*frames: np.ndarray) -> Evaluation:
    """Two episodes of each task, of which one of the second succeeds; the first is filmed."""
    results = [replace(result(e), success=e.id == 3) for e in evaluation_episodes(0, 4, 2, 50, seed=0)]
    return Evaluation(SPEC, True, (replace(results[0], frames=frames), *results[1:]))


def session(path: Path, iterations: range, **log: object) -> None:
    """A run's session, whose iteration 2 has an evaluation with a film; a later one resumes at its start."""
    values = {"dir": str(path), "name": "run"} | log
    config = RunConfig.model_validate({"env": {"name": "tabletop"}, "log": values})
    if iterations.start == 0:
        folder = RunFolder.create(config, env_spec(config.env), ["vla-rl"])
    else:
        folder, _ = RunFolder.reopen(path / "run", config, iterations.start - 1)
        folder.begin()
    for iteration in iterations:
        if iteration == 2:
            frames = [np.full((64, 64, 3), 5 * i, np.uint8) for i in range(30)]
            folder.save_evaluation(iteration, evaluation(*frames))
        folder.log(iteration, {"rollout/success": iteration / 10, "eval/greedy_success": 0.5})
        with folder.checkpoints.write(iteration) as partial:
            state = {"policy_version": iteration, "seconds": 0, "store": {}}
            (partial / "state.json").write_text(json.dumps(state))
    folder.close()


def test_tensorboard_gets_metrics_tables_and_films(tmp_path: Path) -> None:
    session(tmp_path, range(4))
    session(tmp_path, range(3, 5))  # from iteration 2: a run that lost iteration 3
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    success = [(event.step, round(event.value, 4)) for event in events.Scalars("rollout/success")]
    assert success == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)], "iteration 3 once"
    assert set(events.Tags()["scalars"]) == {"rollout/success", "eval/greedy_success"}
    (table,) = events.Tensors("eval/greedy_tasks")
    text = table.tensor_proto.string_val[0].decode()
    assert table.step == 2
    assert "| 1 | do 1 | 2 | 1 | 0.500 | 0.095 | 0.905 |" in text
    (film,) = events.Images("eval/greedy_video")
    assert film.encoded_image_string.startswith(b"GIF89a")
    assert (tmp_path / "run/evaluations/000002-greedy.mp4").stat().st_size > 0


def test_tensorboard_gets_a_page_of_charts_and_the_hyperparameters(tmp_path: Path) -> None:
    """Once also after a run has gone back to its beginning, which hides what was written before."""
    config = RunConfig.model_validate(
        {"env": {"name": "tabletop"}, "learner": {"lr": 3e-4}, "log": {"dir": str(tmp_path), "name": "run"}}
    )
    folder = RunFolder.create(config, env_spec(config.env), ["vla-rl"])
    folder.log(1, {"rollout/success": 0.5})
    folder.go_back(print)
    folder.log(1, {"rollout/success": 0.25})
    folder.close()
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [event.tensor_proto.float_val[0] for event in events.Tensors("rollout/success")] == [0.25]
    (written,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(written.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["success", "learner", "throughput"]
    charts = [chart for category in layout.category for chart in category.chart]
    assert charts[0].margin.series[0].upper == "eval/greedy_high95"
    tags = {tag.removesuffix("$") for chart in charts for tag in chart.multiline.tag}
    tags |= {tag for chart in charts for s in chart.margin.series for tag in (s.value, s.lower, s.upper)}
    assert len(tags) > 15
    assert not undocumented(tags)
    content = events.PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    assert (start["learner.lr"].number_value, start["algo.name"].string_value) == (3e-4, "ppo")
    columns = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment
    assert {metric.name.tag for metric in columns.metric_infos} <= documented()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_goes_on_after_the_disk_was_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure must not be raised again later: the run could not be restarted."""
    config = RunConfig.model_validate({"env": {"name": "tabletop"}, "log": {"dir": str(tmp_path), "name": "run"}})
    folder = RunFolder.create(config, env_spec(config.env), ["vla-rl"])
    folder.log(1, {"a": 1.0})
    with limited_files(0):
        for iteration in (2, 3):
            with pytest.raises(OSError, match="too large"):
                folder.log(iteration, {"a": 1.0})
    folder.log(4, {"a": 1.0})
    assert scalars(tmp_path / "run/tensorboard", "a") == [(iteration, 1.0) for iteration in (1, 2, 3, 4)]
    caplog.clear()
    with limited_files(60):  # room for the run's own files only
        folder.go_back(print)  # there is no checkpoint: to the beginning
    assert [text.partition(" (")[0] for text in caplog.messages] == ["TensorBoard failed"]
    folder.log(1, {"a": 1.5})
    folder.close()
    assert scalars(tmp_path / "run/tensorboard", "a") == [(1, 1.5)]


def complete_records(file: Path) -> list[Any]:
    """The records of an offline run. Its service writes the last ones a moment after ``finish``."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 60
    while True:
        records = [Record.FromString(data) for data in offline_records(file)]
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.1)


def offline_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format, blocks of 32 KiB with parts of records, after 7 bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no place for another header
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_gets_the_same_and_a_resumed_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    sorting = {"wandb_entity": "a-team", "wandb_group": "a study", "wandb_tags": ("first", "second")}
    session(tmp_path, range(3), wandb="offline", tensorboard=False, **sorting)
    session(tmp_path, range(3, 5), wandb="offline", tensorboard=False, **sorting)
    name = (tmp_path / "run/wandb_id").read_text()
    assert re.fullmatch(r"run-[0-9a-f]{8}", name)
    files = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{name}.wandb"] * 2, "one id, two sessions"
    rows: list[dict] = []
    sorted_by = set()
    for file in files:
        for record in complete_records(file):
            if record.WhichOneof("record_type") == "run":
                sorted_by.add((record.run.entity, record.run.run_group, tuple(record.run.tags)))
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    assert sorted_by == {("a-team", "a study", ("first", "second"))}
    success = {row["iteration"]: row["rollout/success"] for row in rows if "rollout/success" in row}
    assert success == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    (evaluation,) = [row for row in rows if "eval/greedy_tasks/nrows" in row]
    assert evaluation["iteration"] == 2
    assert (evaluation["eval/greedy_tasks/nrows"], evaluation["eval/greedy_tasks/ncols"]) == (2, 7)
    assert evaluation["eval/greedy_video/_type"] == "video-file"
    assert list(files[0].parent.rglob("*.mp4")), "the film is there"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "finds no key of W&B: call `wandb login`, set WANDB_API_KEY, or use offline"),
        ({"WANDB_API_KEY": "short"}, r"API key must have 40\+ characters, has 5. Call `wandb login`, correct the key"),
        ({"WANDB_API_KEY": "a" * 40, "WANDB_MODE": "offline"}, "contradicts WANDB_MODE=offline of the environment"),
    ],
)
def test_wandb_without_a_key_is_refused_before_anything_starts(
    tmp_path: Path, nobody: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"log\.wandb=online \(command line\): .*{expected}"):
        load_checked_config("tabletop", ["log.wandb=online"])
    load_checked_config("tabletop", ["log.wandb=offline"])
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log\.wandb=offline \(command line\): needs wandb: pip install wandb"):
        load_checked_config("tabletop", ["log.wandb=offline"])


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network, and with a key."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setattr(loggers, "_WANDB_START_S", 1.0)
    wandb.teardown()  # what it knows of the environment


def test_wandb_that_cannot_be_reached_logs_offline(
    tmp_path: Path, nobody: None, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    load_checked_config("tabletop", ["log.wandb=online"])
    assert time.monotonic() - began < 4, "no server is asked for it"
    session(tmp_path, range(3), wandb="online", tensorboard=False)
    (kept,) = (tmp_path / "run/wandb").glob("offline-run-*")
    assert f"The run is logged offline; later: wandb sync {kept}" in caplog.text
    assert [record["iteration"] for record in read_records(tmp_path / "run/metrics.jsonl")] == [0, 1, 2]


class Answers(BaseHTTPRequestHandler):
    """As much of W&B's server as the start of a run asks."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(errors="replace")
        named = re.search(r'"name":"(run-id)"', asked)
        bucket: dict[str, Any] = {"id": "b", "name": named and named[1], "config": "{}", "historyLineCount": 0}
        bucket["project"] = {"id": "p", "name": "vla_rl", "entity": {"id": "e", "name": "me"}}
        answer = json.dumps({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}, "model": None}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


def test_wandb_that_is_lost_later_says_how_to_upload_the_rest(
    tmp_path: Path, nobody: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(loggers, "_WANDB_START_S", 10.0)
    monkeypatch.setattr(loggers, "_WANDB_END_S", 0.5)
    (tmp_path / "wandb_id").write_text("run-id")
    logger = loggers.WandbLogger(tmp_path, RunConfig(), "online")
    server.shutdown()
    server.server_close()
    logger.log(1, {"a": 1.0})
    logger.close()
    (kept,) = (tmp_path / "wandb").glob("run-*")
    assert f"not all of the run was uploaded; later: wandb sync {kept}" in caplog.text


def test_observers_that_fail_do_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig.model_validate({"env": {"name": "tabletop"}, "log": {"dir": str(tmp_path), "name": "run"}})
    folder = RunFolder.create(config, env_spec(config.env), ["vla-rl"])
    whole = [np.zeros((64, 64, 3), np.uint8)] * 2
    broken = MagicMock()
    for name in ("log", "log_evaluation", "rewind", "close"):
        getattr(broken, name).side_effect = ConnectionError("no network")  # an OSError
    last = MagicMock()
    folder._loggers += [broken, last]
    folder.save_evaluation(1, evaluation(*whole))
    film = tmp_path / "run/evaluations/000001-greedy.mp4"
    folder.save_evaluation(2, evaluation(*whole, np.zeros((32, 64, 3), np.uint8)))
    folder.log(2, {"a": 1.0})
    folder.go_back(print)
    folder.log(1, {"a": 1.0})
    folder.close()
    assert (tmp_path / "run/evaluations/000002-greedy.json").is_file()
    assert [call.args[3] for call in last.log_evaluation.call_args_list] == [film, None]
    assert (last.log.call_count, last.rewind.call_count, last.close.call_count) == (2, 1, 1), "the others go on"
    assert caplog.text.count("no network") == 6


def test_a_resumed_run_begins_whatever_its_observers_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session(tmp_path, range(3))
    shutil.rmtree(tmp_path / "run/tensorboard")
    (tmp_path / "run/tensorboard").touch()  # no folder can be made there
    (tmp_path / "run/wandb_id").mkdir()
    session(tmp_path, range(3, 5), wandb="offline")
    assert [record["iteration"] for record in read_records(tmp_path / "run/metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert "TensorBoard failed" in caplog.text
    assert "W&B failed" in caplog.text


# --- docs/metrics.md ------------------------------------------------------------------------------------------------


def test_each_metric_of_the_page_exists_in_the_code() -> None:
    names, patterns = written_names()
    assert not [name for name in documented() if not is_written(name, names, patterns)]
    assert len(documented()) > 80
    gone = {"made_up", "learner/ratio_pxx", "learner/clip_fractions", "episodes/imagined_eaten", "eval/greedy_median"}
    assert not [name for name in gone if is_written(name, names, patterns)]


def written_names() -> tuple[set[str], set[str]]:
    """What the code can call a metric: strings, fields and keywords; and f-strings with much text, as patterns."""
    names, patterns = set(), set()
    files = [path for room in ("vla_rl", "algos") for path in (ROOT / room).rglob("*.py")]
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                docstring.value = None
            case ast.Constant(value=str(text)):
                names.add(text)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.JoinedStr(values=parts):
                texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
                if len("".join(filter(None, texts))) >= 4:
                    patterns.add("".join(r"(\w+)" if text is None else re.escape(text) for text in texts))
    return names, patterns


def is_written(name: str, names: set[str], patterns: set[str]) -> bool:
    """Whether the code has the name, also built from a pattern whose gaps are numbers or names of the code."""
    last = name.rpartition("/")[2]
    if {name, last} & names:
        return True
    found = [re.fullmatch(pattern, text.replace("N", "3")) for pattern in patterns for text in (name, last)]
    return any(match and all(gap.isdecimal() or gap in names for gap in match.groups()) for match in found)


def test_the_page_is_a_list_of_single_lines() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert all(line.count("|") == 3 and len(line.split("|")[2].strip()) > 8 for line in rows)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(names) == len(set(names))
    assert undocumented({"rollout/staleness_3", "eval/greedy_success_task_12", "world_model/depth2_gap"}) == set()
    assert undocumented({"rollout/staleness", "made/up"}) == {"rollout/staleness", "made/up"}
