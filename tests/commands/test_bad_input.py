"""Input that is wrong: each time one clear error with status 2, no traceback, and nothing left behind.

Everything here is refused before a process is started: where the cluster would be, there is a wall. In a row, ``{tmp}``
is an empty folder, ``{config}`` a good config, ``{run}`` the folder of a run with one checkpoint, ``{bad}`` a folder
with what ``_files`` makes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pydantic import BaseModel

from tests.runtime_fakes import limited_files, trajectory
from vla_rl.commands import evaluate, train
from vla_rl.commands.chaos import command
from vla_rl.commands.cli import main
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.trajectory_file import save_trajectories

GOOD = "env: {name: workload}\ntrain: {eval_episodes: 0}\nplacement: {env_workers: 1}\nlog: {tensorboard: false}\n"
DEEP, LONG = "[" * 100_000, "9" * 5000

# (words of the command line after `vla-rl train CONFIG`, what the error says)
OVERRIDES = [
    # where a run is written
    ("log.dir=/proc/runs", "log.dir=/proc/runs: no run folder can be written there"),
    ("log.dir=/sys", "no run folder can be written there"),
    ("log.dir={config}", "no run folder can be written there"),
    ("log.dir={bad}/loop", "no run folder can be written there"),
    ("log.dir=/dev/null/x", "no run folder can be written there"),
    ("log.dir={tmp}/" + "d" * 300, "no run folder can be written there"),
    ("log.dir=5", "log.dir"),
    ("log.name=" + "n" * 300, "use at most 200"),
    ("log.name=" + "ü" * 150, "300 bytes"),
    ("log.name=..", "log.name"),
    ("log.name=.", "log.name"),
    ("log.name=../x", "without slashes"),
    ("log.name=a/b", "without slashes"),
    ("log.name=/tmp", "without slashes"),
    ("log.name=''", "log.name"),
    ('log.name="a\\0b"', "log.name"),
    ('log.name="a\\nb"', "log.name"),
    ("log.name=file log.dir={bad}", "no run folder can be written there"),
    ("log.name=exists log.dir={bad}", "exists; continue that run with --resume"),
    # numbers that no machine has room for
    ("placement.envs_per_worker=1000000000", "at most 65536"),
    ("placement.envs_per_worker=65536 env.image_size=4096", "of shared memory"),
    ("placement.slots_per_worker=4", "it is now placement.envs_per_worker"),
    ("placement.env_workers=100000", "at most 10000"),
    ("placement.env_workers=10000", "GiB of memory"),
    ("placement.max_batch=1000000000", "at most 65536"),
    ("placement.inference_threads=100000", "at most 4096"),
    ("placement.devices=100000", "placement.devices"),
    ("placement.nodes=2", "placement.ray_address"),
    ("placement.env_hosts=1", "placement.ray_address"),
    ("placement.env_hosts=1000000000", "at most 1000"),
    ("placement.env_hosts=-1", "at least 0"),
    ("placement.env_hosts=all", "is a group of keys; set one of placement.env_hosts.min"),
    ("placement.env_hosts.min=3", "min=3 is above max=0"),
    ("placement.env_hosts.max=1000000000", "at most 1000"),
    ("placement.env_host_cores=1000000000", "at most 4096"),
    ("env.image_size=100000", "at most 4096"),
    ("env.image_size=0", "at least 1"),
    ("env.max_episode_steps=99999999999", "at most 2147483647"),
    ("env.max_episode_steps=2000000000", "of shared memory"),
    ("train.batch_episodes=1000000000000", "at most 2147483647"),
    ("train.batch_episodes=1000001", "at most 1000000"),
    ("train.batch_episodes=1e12", "whole number"),
    ("train.batch_episodes=1000000 env.image_size=4096", "of shared memory"),
    ("train.max_staleness=1000000000000000000000", "at most 2147483647"),
    ("train.max_staleness=10001", "at most 10000"),
    ("train.max_staleness=-1", "at least 0"),
    ("train.iterations=" + LONG, "train.iterations"),
    ("train.iterations=1e400", "finite"),
    ("train.iterations=.nan", "finite"),
    ("learner.threads=100000", "at most 4096"),
    ("learner.ranks=9999", "CPU cores"),
    ("learner.zero_stage=4", "at most 3"),
    ("learner.max_skipped_updates=0", "at least 1"),
    ("learner.lr=-1", "at least 0"),
    ("learner.lr=.inf", "finite"),
    ("seed=99999999999", "less than"),
    ("policy.chunk_size=1000000000000", "at most 2147483647"),
    ("policy.chunk_size=1000", "would end within the first chunk"),
    # values of another kind
    ("train.iterations=two", "whole number"),
    ("train.iterations=null", "train.iterations"),
    ("train.iterations=[1]", "whole number"),
    ("train.iterations={{}}", "train.iterations"),
    ("train.iterations=true", "whole number"),
    ("train.iterations=1.5", "whole number"),
    ("train={{}}x", "train"),
    ("train=3", "is a group of keys"),
    ("env=nowhere", "allowed: "),
    ("env.name=[1]", "env.name"),
    ("algo=ppp", "did you mean ppo?"),
    ("policy=none", "allowed: "),
    ("mode=fast", "allowed: async, sync"),
    ("log.tensorboard=3", "true or false"),
    ("log.wandb=yes", "log.wandb"),
    ("log.wandb_tags=['']", "log.wandb_tags[0]"),
    ("env=libero env.tasks=0", "must be a list"),
    ("env=libero env.tasks=[99]", "libero_spatial has tasks 0..9, not 99"),
    ("env=libero env.tasks=[0,0]", "name each task once"),
    ("learner.betas=[0.9]", "learner.betas"),
    ("learner.betas=[0.9,1.0]", "below 1"),
    # text that is no YAML, or too much of it
    ("train.iterations=" + DEEP, "not valid YAML"),
    ("train.iterations=" + '{{"a":' * 2000, "not valid YAML"),
    ("{{ " * 2000, "and 1961 more"),
    ("train.iterations=[1", "not valid YAML"),
    ('log.name="open', "not valid YAML"),
    ("log.name=${{oc.env:HOME}}", "interpolation"),
    ("log.name=@", "YAML"),
    ("log.name=!!python/name:os.system", "YAML"),
    ("train.iterations", "is not an override"),
    ("=3", "is not an override"),
    ("train..iterations=3", "is not an override"),
    ("train.iteration=3", "did you mean train.iterations?"),
    ("a=1", "unknown key"),
    # files that are named
    ("policy.checkpoint=~nobody-of-that-name/x", "policy.checkpoint"),
    ("policy.checkpoint={bad}/loop", "policy.checkpoint"),
    ("policy.checkpoint={config}", "is not a folder"),
    ("policy.checkpoint={bad}", "is missing"),
    ("policy.checkpoint=''", "policy.checkpoint"),
    ("policy.checkpoint={tmp}/" + "c" * 300, "policy.checkpoint"),
    ("placement.profile={tmp}/none.yaml", "placement.profile"),
    ("placement.profile={bad}", "placement.profile"),
    ("placement.profile={bad}/null.json", "placement.profile"),
    ("placement.profile={bad}/deep.yaml", "placement.profile"),
    ("placement.virtual={bad}/latin1.yaml", "placement.virtual"),
    ("placement.ray_address=nonsense", "HOST:PORT"),
    ("placement.ray_address=host:port", "HOST:PORT"),
    ("placement.ray_address=host:99999", "HOST:PORT"),
    ("placement.ray_address=ray://host:1", "HOST:PORT"),
    ("placement.ray_address=127.0.0.1:1", "no Ray cluster was joined there"),
    ('placement.ray_address="[::1]:1"', "no Ray cluster was joined there"),
    # combinations
    ("placement.replan_every=3 placement.mode=collocated", "replan"),
    ("train.reuse=5", "train.reuse"),
    ("train.publish_every=9", "train.publish_every"),
    ("algo=grpo train.batch_episodes=7", "multiple"),
    ("learner.offload_optimizer=cpu", "zero_stage"),
]
# for every key: a mapping, and a list of lists; for paths, also a character that none can have
WRONG_KINDS = ['{{"a":1}}', "[[1]]"]
PATHS = ("log.dir", "policy.checkpoint", "placement.profile", "placement.virtual")
# (the whole command line, what the error says)
COMMANDS = [
    ("train {tmp}/none.yaml", "does not exist"),
    ("train {tmp}", "cannot be read"),
    ("train {bad}/loop", "cannot be read"),
    ("train {bad}/latin1.yaml", "cannot be read"),
    ("train {bad}/deep.yaml", "not valid YAML"),
    ("train {bad}/blocks.yaml", "not valid YAML"),
    ("train {bad}/digits.yaml", "not valid YAML"),
    ("train {bad}/large.yaml", "longer than"),
    ("train {bad}/alias.yaml", "aliases"),
    ("train {bad}/twice.yaml", "given before on line"),
    ("train {bad}/list.yaml", "expected groups"),
    ("train {bad}/itself.yaml", "is this file itself"),
    ("train {bad}/based.yaml", "there is no file"),
    ("train {bad}/tab.yaml", "not valid YAML"),
    ("train {config} policy.checkpoint={bad}/policy", "statistics.json is of another policy: it has 6 dimensions"),
    ("train /dev/zero", "longer than"),
    ("train --resume {tmp}", "no run folder"),
    ("train --resume {config}", "no run folder"),
    ("train --resume {run}@7", "no complete checkpoint of iteration 7; there are: 4"),
    ("train --resume {run} train.iterations=0", "at least 1"),
    ("train {config} --resume {run}", "leave out"),
    ("plot {tmp}", "does not exist"),
    ("plot {bad}/null.json", "nothing to draw"),
    ("plot {bad}/garbage.jsonl", "garbage.jsonl:2 is not JSON"),
    ("plot {bad}/latin1.yaml", "cannot be read"),
    ("plot {bad}/loop", "cannot be read"),
    ("report {tmp}", "does not exist"),
    ("report {bad}/loop", "cannot be read"),
    ("report {run} {run}", "two runs have the name"),
    ("report {run} --output {bad}", "cannot be written"),
    ("why {tmp}", "does not exist"),
    ("why {bad}/null.json", "holds no iteration yet"),
    ("why {bad}/garbage.jsonl", "garbage.jsonl:2 is not JSON"),
    ("eval {tmp}", "its simulator is unknown; give the config: --config FILE"),
    ("eval {bad}/loop", "neither a run folder nor a checkpoint"),
    ("eval {run} policy.checkpoint={tmp}/none", "does not exist"),
    ("eval {run} --best", "no evaluation by which to choose"),
    ("eval {bad} --best", "not the folder of a run"),
    ("eval {run} --failures 3", "--failures 3: into which film? Name it, too: --video FILE"),
    ("eval {run} --config {bad}/deep.yaml", "not valid YAML"),
    ("export {tmp} --format native --output {tmp}", "exists; name a new folder"),
    ("export {tmp} --format native --output {tmp}/new", "is no checkpoint of openvla_oft, pi0, lerobot"),
    ("export {bad}/policy --format gguf --output {tmp}/new", "can be written as openvla-oft, openvla, lora, native"),
    ("chaos {tmp}/none.yaml", "does not exist"),
    ("chaos {config} --faults flood", "'flood' is none; choose from all, none, kill"),
    ("chaos {config} --faults kill,,driver", "'' is none"),
    ("chaos {config} --minutes 0", "'0' is not a number above 0"),
    ("chaos {config} --minutes nan", "'nan' is not a number"),
    ("chaos {config} --every soon", "'soon' is not a number"),
    ("chaos {config} --seed -1", "'-1' is not a whole number"),
    ("chaos {config} --count 0", "is not a whole number above 0"),
    ("chaos {config} --undisturbed {tmp}", "metrics.jsonl does not exist"),
    ("chaos {config} log.dir=/proc", "no folder can be made there"),
    ("chaos {config} train.iterations=0", "at least 1"),
    ("plan {config} placement.profile={tmp}/none.yaml", "placement.profile"),
    ("plan {bad}/deep.yaml", "not valid YAML"),
    ("profile {tmp}/none.yaml --output {tmp}/p.yaml", "does not exist"),
    ("sft {config} sft.threads=100000", "at most 4096"),
    ("study {tmp}/none.yaml", "cannot be read as a study"),
    ("study {bad}/deep.yaml", "cannot be read as a study"),
    ("study {bad}/null.json", "is not a study"),
]
# damage to the run's checkpoint of iteration 4: (file, its new content, what the error of --resume says)
DAMAGE = [
    ("state.json", b"null", "state.json is damaged"),
    ("state.json", b"{}", "state.json is damaged"),
    ("state.json", b"", "state.json is damaged"),
    ("state.json", None, "state.json is missing"),
    ("trajectories.npz", b"PK", "trajectories.npz is damaged"),
    ("trajectories.npz", None, "trajectories.npz is missing"),
    ("learner/state/0-of-1.safetensors", b"half", "0-of-1.safetensors is damaged"),
    ("learner/state/0-of-1.safetensors", None, "0-of-1.safetensors is missing"),
    ("files.json", b"[", "files.json is damaged"),
    ("files.json", b"[1]", "files.json is damaged"),
    ("../../metrics.jsonl", b'{"iteration": 1}\ngarbage\n', "metrics.jsonl:2 is not JSON"),
    ("../../config.yaml", b"train: [", "not valid YAML"),
    ("../../config.yaml", b"policy: {size: nano}\nx: 1", "unknown key"),
]


def _keys(group: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a config, such as ``train.iterations``."""
    for name in type(group).model_fields:
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


KEYS = list(_keys(RunConfig.model_validate({"env": {"name": "workload"}})))


def _files(folder: Path) -> None:
    """Files that are wrong in themselves."""
    folder.mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "exists").mkdir()
    (folder / "file").write_text("")
    for name, text in {
        "deep.yaml": "train: " + DEEP,
        "blocks.yaml": "\n".join(" " * level + "a:" for level in range(1200)),
        "digits.yaml": "seed: " + LONG,
        "large.yaml": GOOD + "#" * 10_000_000,
        "alias.yaml": "a: &a 1\nb: *a",
        "twice.yaml": "seed: 1\nseed: 2",
        "list.yaml": "- 1",
        "itself.yaml": "base: itself.yaml",
        "based.yaml": "base: none.yaml",
        "tab.yaml": "train:\n\titerations: 1",
        "null.json": "null",
        "garbage.jsonl": '{"iteration": 1}\ngarbage\n',
    }.items():
        (folder / name).write_text(text)
    policy = Path("checkpoints/tabletop_reach")
    shutil.copytree(policy, folder / "policy")
    statistics = json.loads((policy / "statistics.json").read_text())
    statistics["action"] = {name: values[1:] for name, values in statistics["action"].items()}
    (folder / "policy/statistics.json").write_text(json.dumps(statistics))
    (folder / "latin1.yaml").write_bytes("log: {name: ü}".encode("latin1"))


def _run(folder: Path, config: Path) -> None:
    """A run with a checkpoint of iteration 4."""
    folder.mkdir()
    run = RunFolder(folder, load_config(config))
    run.log(4, {})
    (folder / "config.yaml").write_text(GOOD)
    with run.checkpoints.write(4) as partial:
        (partial / "state.json").write_text(json.dumps({"policy_version": 4, "seconds": 1.0, "store": {}}))
        save_trajectories(partial / "trajectories.npz", [trajectory(training_episode(0, 0, 0))])
        (partial / "learner/state").mkdir(parents=True)
        (partial / "learner/state/0-of-1.safetensors").write_bytes(b"whole")
        (partial / "policy").mkdir()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bad")
    config = root / "good.yaml"
    config.write_text(GOOD)
    _files(root / "bad")
    _run(root / "run", config)
    return {"config": config, "bad": root / "bad", "run": root / "run"}


class _Wall(Exception):
    """The input was accepted, and processes would be started now."""


@pytest.fixture(autouse=True)
def wall(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> NoReturn:
        raise _Wall

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(train, "Cluster", stop)
    monkeypatch.setattr(evaluate, "Cluster", stop)
    monkeypatch.setattr(command.TrainingRun, "start", stop)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], places: dict[str, Path], tmp_path: Path) -> Callable:
    def check(line: str, expected: str, **more: Path) -> None:
        words = [word.format(**places | {"tmp": tmp_path} | more) for word in line.split(" ")]
        there = set(tmp_path.rglob("*")) | set(places["bad"].rglob("*"))
        capsys.readouterr()
        try:
            status = main(words)
        except SystemExit as error:  # of argparse
            status = error.code
        shown = capsys.readouterr()
        assert status == 2, shown
        assert expected in shown.err, shown.err
        assert shown.err.count("error:") == 1
        assert "Traceback" not in shown.err
        assert len(shown.err) < 4000, "one message, and no flood"
        assert set(tmp_path.rglob("*")) | set(places["bad"].rglob("*")) == there, "nothing is left behind"

    return check


def _id(value: str) -> str:
    return "".join(c if c in string.printable and c not in "\n\r\t\x0b\x0c" else "_" for c in value[:50])


def test_good_input_is_accepted(places: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(_Wall):
        main(["train", str(places["config"]), f"log.dir={tmp_path}"])
    assert not list(tmp_path.iterdir()), "the run has logged nothing"
    with pytest.raises(_Wall):
        main(["train", "--resume", str(places["run"])])


@pytest.mark.parametrize(("given", "expected"), OVERRIDES, ids=_id)
def test_a_bad_override(given: str, expected: str, refused, tmp_path: Path) -> None:
    where = "" if "log.dir" in given else "log.dir={tmp} "
    refused(f"train {{config}} {where}{given}", expected)


@pytest.mark.parametrize("wrong", WRONG_KINDS)
@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_kind(key: str, wrong: str, refused) -> None:
    refused(f"train {{config}} {key}={wrong}", key)


@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_cannot_be(key: str, refused) -> None:
    refused(f'train {{config}} {key}="\\0"', key)


@pytest.mark.parametrize(("line", "expected"), COMMANDS, ids=_id)
def test_a_bad_command(line: str, expected: str, refused) -> None:
    refused(line, expected)


@pytest.mark.parametrize(("name", "content", "expected"), DAMAGE)
def test_a_damaged_run(
    name: str, content: bytes | None, expected: str, refused, places: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(places["run"], run)
    file = run / "checkpoints/000004" / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    (run / "lock").touch()
    refused(f"train --resume {run}", expected)


@pytest.mark.parametrize("name", ["state.json", "trajectories.npz"])
@pytest.mark.parametrize("content", [b"", b"null", b"{}", b"PK", b"\xff\xfe"])
def test_a_damaged_run_without_checksums(
    name: str, content: bytes, refused, places: dict[str, Path], tmp_path: Path
) -> None:
    """As earlier versions have written it: the file itself has to be doubted."""
    run = tmp_path / "run"
    shutil.copytree(places["run"], run)
    (run / "checkpoints/000004/files.json").unlink(missing_ok=True)
    (run / "checkpoints/000004" / name).write_bytes(content)
    (run / "lock").touch()
    refused(f"train --resume {run}", name)


def test_a_disk_without_room(refused, tmp_path: Path) -> None:
    """Here, a limit on the size of files."""
    with limited_files(16):
        refused("train {config} log.dir={tmp} log.name=run", "no run folder can be written there")


def test_a_port_that_is_in_use(refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused(f"train {{config}} log.dir={{tmp}} log.prometheus_port={port}", f"log.prometheus_port={port}: ")
        refused(f"train --resume {{run}} log.prometheus_port={port}", "choose another port, end what uses it")


def test_output_that_cannot_be_written(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    for lost, expected in ((os.open("/dev/full", os.O_WRONLY), "No space left"), (write, "Broken pipe")):
        monkeypatch.setattr(sys, "stdout", os.fdopen(lost, "w"))
        assert main(["plan", str(places["config"])]) == 2
        shown = capsys.readouterr().err
        assert expected in shown
        assert "Traceback" not in shown
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    with pytest.raises(_Wall):  # a run goes on without
        main(["train", str(places["config"]), f"log.dir={places['config'].parent}/runs"])
    monkeypatch.setattr(sys, "stdout", None)  # started with `>&-`
    assert main(["plan", str(places["config"])]) == 0


def test_the_list_is_long() -> None:
    assert len(OVERRIDES) + len(COMMANDS) + len(DAMAGE) >= 170
    assert len(KEYS) * len(WRONG_KINDS) >= 250
