"""`vla-rl push` and addresses on the hub. The hub itself is never reached: what would be sent is looked at."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml

from envs import env_spec
from tests import ROOT
from vla_rl import evaluate
from vla_rl.commands.cli import main
from vla_rl.commands.evaluate import evaluated_config
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.loading import load_config
from vla_rl.core import hub
from vla_rl.core.errors import UserError
from vla_rl.placement.checks import load_checked_config
from vla_rl.policies.build import check_policy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with two checkpoints of the shipped policy, of which the first is better."""
    parent = tmp_path_factory.mktemp("runs")
    overrides = [f"log.dir={parent}", "log.name=reach", "log.tensorboard=false"]
    config = load_config(ROOT / "configs/tabletop.yaml", overrides)
    folder = RunFolder.create(config, env_spec(config.env), ["vla-rl", "train"])
    for iteration, success in ((1, 0.75), (2, 0.5)):
        rates = {
            "eval/greedy_success": success,
            "eval/greedy_low95": success - 0.1,
            "eval/greedy_high95": success + 0.1,
        }
        folder.log(iteration, rates | {"time/seconds": 1800.0 * iteration})
        with folder.checkpoints.write(iteration, 1) as partial:
            shutil.copytree(ROOT / "checkpoints/tabletop_reach", partial / "policy")
    (folder.path / "curves.png").write_bytes(b"png")
    (folder.path / "evaluations").mkdir()
    (folder.path / "evaluations/000001-greedy.mp4").write_bytes(b"mp4")
    folder.close()
    return folder.path


def header(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_a_dry_run_writes_what_would_be_pushed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["push", str(run), "--best", "--dry-run", str(out)]) == 0
    assert "nothing was" in capsys.readouterr().out
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    policy = {path.name for path in (ROOT / "checkpoints/tabletop_reach").iterdir()}
    others = {"README.md", "config.yaml", "run_metadata.json", "metrics.jsonl", "curves.png", "evaluation.mp4"}
    assert files == policy | others
    card = (out / "README.md").read_text()
    assert header(card)["library_name"] == "vla_rl"
    assert header(card)["license"] == "unknown", "only who knows what it was trained from can say more"
    assert "model-index" not in header(card), "no benchmark was measured"
    for part in (
        "# reach\n",
        "trained by vla_rl with PPO on tabletop: iteration 1 of",
        "greedy success 75.0% (95 %: 65.0% to 85.0%)",
        "Training never saw the initial states of the evaluation.",
        "![curves](curves.png)",
        "evaluation.mp4",
        "vla-rl eval hf://OWNER/NAME",
    ):
        assert part in card, part
    config = evaluated_config(out, None, [], give="", best=False)
    assert config.policy.checkpoint == str(out)
    assert config.train.iterations == load_config(run / "config.yaml").train.iterations
    check_policy(config.policy, env_spec(config.env))


def test_the_card_has_the_table_of_an_evaluation(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = {
        "suite": "reach",
        "planned": 40,
        "episodes": 40,
        "success": 0.7,
        "success_low95": 0.55,
        "success_high95": 0.8,
    }
    evaluation = tmp_path / "evaluations/reach-000002"
    (evaluation / "videos/reach").mkdir(parents=True)
    (evaluation / "results.json").write_text(json.dumps({"facts": ["A fact."], "suites": [suite]}))
    (evaluation / "results.md").write_text("# tables\n")
    for number, outcome in enumerate(["success"] * 5 + ["failure-ended"]):
        (evaluation / f"videos/reach/task0{number}-trial00-{outcome}.mp4").write_bytes(b"mp4")
    monkeypatch.chdir(tmp_path)
    protocol = {"assets": ["original"], "engine": ["", "mujoco 3.3.7"]}
    (evaluation / "protocol.json").write_text(json.dumps(protocol))
    assert main(["push", str(run), "--dry-run", "out", "--license", "apache-2.0"]) == 0
    card = Path("out/README.md").read_text()
    assert "| reach | 40 | 70.0% | 55.0% to 80.0% |" in card
    assert "* A fact." in card
    data = huggingface_hub.ModelCard(card).data
    assert (data.license, data.model_name) == ("apache-2.0", "reach")
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_value) == ("reach", 0.7)
    assert result.dataset_args == {"assets": "original", "engine": "mujoco 3.3.7"}
    assert result.metric_args == {"episodes": 40, "low95": 0.55, "high95": 0.8}
    films = sorted(path.name for path in Path("out/evaluation").rglob("*.mp4"))
    assert len(films) == 4
    assert "task05-trial00-failure-ended.mp4" in films, "failures first"
    assert Path("out/evaluation/results.md").is_file()


@pytest.mark.parametrize(
    ("played", "assets", "listed"), [(2, "original", 1), (1, "original", 0), (2, "placeholder", 0)]
)
def test_the_hub_is_told_only_of_complete_benchmarks(
    run: Path, tmp_path: Path, played: int, assets: str, listed: int
) -> None:
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    suite = {"suite": "reach", "planned": 2, "episodes": played, "success": 0.5}
    suite |= {"success_low95": 0.1, "success_high95": 0.9}
    (evaluation / "results.json").write_text(json.dumps({"facts": [], "suites": [suite]}))
    (evaluation / "protocol.json").write_text(json.dumps({"assets": [assets], "engine": [""]}))
    assert main(["push", str(run), "--dry-run", str(tmp_path / "out"), "--evaluation", str(evaluation)]) == 0
    card = (tmp_path / "out/README.md").read_text()
    assert len(header(card).get("model-index", [])) == listed
    assert "| reach |" in card, "the reader sees it in any case"


def test_a_push_creates_the_repository_and_sends_the_files(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list = []

    def upload_folder(*, folder_path: str, repo_id: str, commit_message: str) -> None:
        calls.append((repo_id, commit_message, {path.name for path in Path(folder_path).iterdir()}))

    api = SimpleNamespace(
        create_repo=lambda repo, **options: calls.append((repo, options)), upload_folder=upload_folder
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    assert main(["push", str(run), "--repo", "me/reach", "--private"]) == 0
    assert calls[0] == ("me/reach", {"private": True, "exist_ok": True})
    assert calls[1][:2] == ("me/reach", "reach, iteration 2")
    assert {"README.md", "model.safetensors", "config.yaml"} <= calls[1][2]
    assert "hf://me/reach (iteration 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--repo", "me/reach"], "me/reach: nothing was pushed"),
        (["--repo", "reach"], "--repo reach: write OWNER/NAME"),
        ([], "where to? --repo OWNER/NAME pushes, --dry-run DIR writes"),
        (["--repo", "me/reach", "--dry-run", "new"], "--repo me/reach pushes and --dry-run new does not"),
        (["--dry-run", "."], "--dry-run . exists"),
        (["--dry-run", "new", "--evaluation", "none"], "none/results.json does not exist"),
        (["--dry-run", "new", "--license", "Apache 2"], "--license 'Apache 2' is no identifier of the model hub"),
    ],
)
def test_what_prevents_a_push_is_one_message(
    run: Path, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["push", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error
    assert not Path("new").exists()


def test_addresses_become_local_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list = []

    def snapshot_download(repo: str, **options: object) -> str:
        asked.append((repo, options["repo_type"], options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "a/b").mkdir(parents=True)
    overrides = ["env=tabletop", "policy.checkpoint=hf://me/policy@v1", "sft.demos=[hf://me/data/a/b, other.hdf5]"]
    config = load_checked_config(None, overrides)
    assert (config.policy.checkpoint, config.sft.demos) == (str(tmp_path), (str(tmp_path / "a/b"), "other.hdf5"))
    assert asked == [("me/policy", "model", "v1", None), ("me/data", "dataset", None, ["a/b", "a/b/*"])]
    with pytest.raises(UserError, match="me/data has no c"):
        hub.download("hf://me/data/c", "dataset")
    with pytest.raises(UserError, match=r"sft.demos.*is no address on the model hub; write hf://OWNER/NAME"):
        load_checked_config(None, ["env=tabletop", "sft.demos=[hf://data]"])


@pytest.mark.parametrize(
    ("key", "value"), [("env", "intruder:Env"), ("env.id", "intruder:Env-v0"), ("policy", "intruder:Policy")]
)
def test_a_downloaded_config_imports_no_code(
    key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the user names that code, too."""
    (tmp_path / "model").mkdir()
    (tmp_path / "intruder.py").write_text("open('imported', 'w')")
    values = {"env": {"name": "gymnasium", "id": value}} if key == "env.id" else {key: {"name": value, "seed": 3}}
    (tmp_path / "model/config.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(UserError, match=f"was downloaded and imports code: {key}={value}. If you trust that code"):
        evaluate("hf://me/model", overrides={"seed": 1})
    for options in ([], ["--suite", "all"]):
        assert main(["eval", "hf://me/model", *options]) == 2
        assert f"imports code: {key}={value}" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
    assert main(["eval", "hf://me/model", f"{key}={value}"]) == 2
    assert "was downloaded and imports code" not in capsys.readouterr().err
    assert (tmp_path / "imported").exists() or key == "env.id", "now it is what the user says"
    with pytest.raises(UserError) as caught:
        evaluate("hf://me/model", overrides={key: value})
    assert "was downloaded" not in str(caught.value)
    sys.modules.pop("intruder", None)


def test_without_network_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for command in (["eval", "hf://me/policy"], ["train", "configs/tabletop.yaml", "policy.checkpoint=hf://me/policy"]):
        monkeypatch.chdir(ROOT)
        assert main(command) == 2
    with pytest.raises(UserError, match=r"this model cannot be downloaded \(.*check the name, the network"):
        hub.download("hf://me/policy", "model")
