"""`vla-rl report`: what the page of a run, or of several, says."""

import base64
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from envs import env_spec
from tests import ROOT
from tests.runtime_fakes import limited_files, result
from vla_rl import report
from vla_rl.commands import report_films
from vla_rl.commands.cli import main
from vla_rl.commands.report import report_at_end
from vla_rl.commands.report_claims import claims
from vla_rl.commands.report_runs import changed, grouped, read_run
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.loading import load_config
from vla_rl.core.errors import UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import write_json
from vla_rl.observability.success_rate import Evaluation, wilson_interval
from vla_rl.replay.schedule import benchmark_episodes

RECORDED = {file.parent: file for file in (ROOT / "docs/results").rglob("*.jsonl")}.values()  # one of each kind
SCRIPT = "<script>alert(1)</script>"
Make = Callable[..., RunFolder]


class Page(HTMLParser):
    """Elements in their order, with what is wrong with their nesting."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(self.source)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += " " + data.strip()

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a run folder of the tabletop with five iterations; evaluations are of 50 episodes each."""

    def made(name: str, *overrides: str, rates: dict[int, float] | None = None, frames: tuple = ()) -> RunFolder:
        about = [f"log.dir={tmp_path}", f"log.name={name}", "log.tensorboard=false", "train.iterations=4", *overrides]
        config = load_config(ROOT / "configs/tabletop.yaml", about)
        spec = replace(env_spec(config.env), instructions=(f"reach {SCRIPT}",))
        run = RunFolder.create(config, spec, ["vla-rl", "train"])
        for i in range(5):
            metrics = {"time/seconds": 60.0 * i, "episodes/started": 10.0 * i + 1, "episodes/trained": 10.0 * i}
            metrics |= {"episodes/control_steps": 100.0 * i, "memory/gib": 2.0}
            if i:
                metrics |= {"rollout/success": 0.2 * i, "learner/update_kl": 0.01 * i, "time/iteration_s": 50.0}
                metrics |= {"throughput/env_steps_per_s": 100.0, "busy/learner": 0.5}
            if (rate := ({0: 0.36, 4: 0.86} if rates is None else rates).get(i)) is not None:
                low, high = wilson_interval(50 * rate, 50)
                metrics |= {"eval/greedy_success": rate, "eval/greedy_low95": low, "eval/greedy_high95": high}
                episodes = benchmark_episodes([0], 4, 50, 0)
                outcomes = tuple(replace(result(e), success=e.member % 2 == 0) for e in episodes)
                outcomes = (replace(outcomes[0], frames=frames), replace(outcomes[1], frames=frames), *outcomes[2:])
                run.save_evaluation(i, Evaluation(spec, True, outcomes))
            run.log(i, metrics)
        with run.checkpoints.write(4) as partial:
            devices = {"simulators": [], "inference": [0, 1], "learner": [0, 1]}
            layout = {"mode": "collocated", "offload": False} | devices
            state = {"policy_version": 4, "seconds": 240.0, "store": {}}
            write_json(partial / "state.json", state | {"layout": layout})
        run.close()
        return run

    return made


def test_one_run(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("one", "algo.clip_high=0.3")
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.path / 'report.html'}\n"
    page = Page(run.path / "report.html")
    for part in (
        "PPO on tabletop: one",
        "Greedy success rose from 36% (95%: 24% to 50%) before training to 86% (95%: 74% to 93%) after 4 updates.",
        "The intervals do not overlap.",
        "4 of 4",
        "complete",
        "40 (97.6%)",  # of the episodes were trained on
        "0, 1, by turns with another role",
        "50% (15% to 85%), 2 of 4",
        "algo.clip_high 0.3 0.2",
        "vla-rl train",
    ):
        assert part in re.sub(r"\s+", " ", page.text), part
    assert [attributes["scope"] for attributes in page.all("th")]
    assert all(attributes["aria-label"] for attributes in page.all("svg") if attributes.get("role") == "img")
    assert [len(page.all(name)) for name in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    assert [tag for tag, _ in page.elements if re.fullmatch(r"h\d", tag)] == ["h1"] + ["h2"] * len(page.all("section"))
    places = {attributes.get(name) for _, attributes in page.elements for name in ("src", "href", "data")} - {None}
    assert all(str(place).startswith("#") for place in places), "nothing comes from elsewhere"
    assert not re.search(r"https?:|url\(|@import", page.source)


def test_what_others_have_written_is_text(make: Make) -> None:
    page = Page(report(make("one", "policy.checkpoint='<img src=x>'").path))
    assert len(page.all("script")) == 1, "the page's own"
    assert not page.all("img")
    assert SCRIPT in page.text
    assert "<img src=x>" in page.text


def test_films_of_the_first_and_of_the_newest_evaluation(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = (np.zeros((64, 64, 3), np.uint8),) * 5
    run = make("one", rates={0: 0.3, 2: 0.4, 4: 0.5}, frames=frames)
    page = Page(report(run.path))
    videos = page.all("video")
    labels = ["Greedy evaluation before training", "Greedy evaluation after 4 updates"]
    assert [video["aria-label"] for video in videos] == labels
    for video, iteration in zip(videos, (0, 4), strict=True):
        film = (run.path / f"evaluations/00000{iteration}-greedy.mp4").read_bytes()
        kind, _, content = str(video["src"]).partition(",")
        assert (kind, base64.b64decode(content)) == ("data:video/mp4;base64", film)
        assert {"controls", "muted"} <= video.keys()
        assert "autoplay" not in video
    assert "media-src data:" in str(page.all("meta")[1]["content"])
    text = re.sub(r"\s+", " ", page.text)
    assert f"From 0 s: reach {SCRIPT}. Success, after 10 steps. From 2 s: reach {SCRIPT}. Failure: time limit" in text
    monkeypatch.setattr(report_films, "_MOST_BYTES", len(film))
    page = Page(report(run.path))
    assert [video["aria-label"] for video in page.all("video")] == labels[1:], "the newest first"
    assert f"Too large for this page: {run.path / 'evaluations/000000-greedy.mp4'}." in page.text


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({0: 0.5, 4: 0.4}, "fell from 50% (95%: 37% to 63%) before training to 40% (95%: 28% to 54%) after 4 updates."),
        ({2: 0.5, 4: 0.5}, "stayed: from 50% (95%: 37% to 63%) after 2 updates to 50%"),
        ({0: 0.5, 4: 0.4}, "The intervals overlap."),
        ({0: 0.5}, "Greedy success before training: 50% (95%: 37% to 63%). No other evaluation has been made."),
        ({}, "No evaluation was made. Of the rollouts, 40% succeeded at first and 60% at last."),
    ],
)
def test_the_claim(make: Make, rates: dict[int, float], expected: str) -> None:
    assert expected in claims(grouped([read_run(make("one", rates=rates).path)]))[0]


def test_several_runs_are_compared_by_config(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make("first"), make("second", "seed=1", rates={0: 0.4, 4: 0.9})
    other = make("other", "algo.clip_high=0.3", rates={0: 0.36, 4: 0.5})
    monkeypatch.chdir(tmp_path)
    page = Page(report(first.path, second.path, other.path))
    assert (tmp_path / "report.html").is_file()
    groups = ["algo.clip_high=0.28 (2 seeds)", "algo.clip_high=0.3"]
    assert list(grouped([read_run(run.path) for run in (first, second, other)])) == groups
    text = re.sub(r"\s+", " ", page.text)
    assert "3 runs, 2 configs" in text
    assert f"{groups[0]}: Greedy success rose from 38% to 88%, mean of 2 seeds; they ended at 86% to 90%." in text
    assert f"{groups[1]}: Greedy success rose from 36%" in text
    assert "algo.clip_high 0.28 0.3" in text
    bands = [attributes for attributes in page.all("polygon") if attributes["class"] == "band c0"]
    assert bands, "of the two seeds"
    assert len(bands) == len(page.all("polygon")), "one run alone has none"
    copy = tmp_path / "copies" / "first"
    shutil.copytree(first.path, copy)
    assert main(["report", str(first.path), str(copy)]) == 2
    assert "two runs have the name 'first'" in capsys.readouterr().err


def test_only_what_differs_from_the_defaults_is_listed(make: Make) -> None:
    found = changed(read_run(make("one", "policy.lora={rank: 8}", "env.distractors=3").path))
    assert found["policy.lora.rank"] == ("8", "32")
    assert found["train.iterations"] == ("4", "100")
    assert not {"policy.lora.alpha", "seed", "learner.betas", "env.name"} & found.keys()


def test_a_run_says_how_far_it_is(make: Make) -> None:
    run = make("one", "train.iterations=9")
    assert read_run(run.path).status.startswith("stopped; it continues with: vla-rl train --resume ")
    lock = FileLock.acquire(run.path / "lock")
    assert lock is not None
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "ti')  # is being written
    assert read_run(run.path).status == "running"
    lock.release()
    assert read_run(make("timed", "train.iterations=9", "train.max_minutes=3").path).status.endswith("3 minutes was up")
    patient = make("patient", "train.iterations=9", "train.patience=1", rates={0: 0.5, 4: 0.4})
    assert read_run(patient.path).status == "complete: 1 evaluations brought no higher success"


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_recorded_metrics_of_all_versions_have_a_page(file: Path, tmp_path: Path) -> None:
    page = Page(report(file, output=tmp_path / "report.html"))
    assert len(page.source) < 2_000_000
    assert {"Success", "Learning", "Speed"} <= {word for word in page.text.split() if word}


def test_a_report_that_cannot_be_written_is_said_and_ends_no_run(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    run = make("one")
    with limited_files(100):
        with pytest.raises(UserError, match=r"report.html cannot be written .* name another file with --output"):
            report(run.path)
        report_at_end(run)
    assert "report.html failed (UserError" in caplog.text
    assert not (run.path / "report.html").exists()


def test_the_end_of_a_run_writes_its_report(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("one")
    report_at_end(run)
    assert capsys.readouterr().out == f"report: {run.path / 'report.html'}\n"
    (run.path / "report.html").unlink()
    reopened, _ = RunFolder.reopen(run.path, run.config)
    reopened.close()  # before it began
    report_at_end(reopened)
    assert not (run.path / "report.html").exists(), "what was not begun changes nothing"
