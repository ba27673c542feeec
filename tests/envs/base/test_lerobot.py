"""LeRobot's data sets: one that the package lerobot has written is read, and our own are written, added to and read.

``data/lerobot_twin`` is the output of `scripts/make_lerobot_twin.py --episodes 5 --writer lerobot` with lerobot 0.6.1.
That lerobot reads what is written here is checked by `scripts/check_lerobot.sh`, which needs the package.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from envs.base import lerobot_writer
from envs.base.demonstration_records import DemonstrationError, Demonstrations
from envs.base.demonstrations import read_demonstrations
from envs.base.lerobot_writer import EpisodeData, add_pending, save_episode
from envs.base.recorder import RecordedEnv
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import TabletopVectorEnv, env_spec
from scripts.make_lerobot_twin import CONFIG, play
from vla_rl.core.errors import UserError
from vla_rl.core.files import write_json
from vla_rl.core.records import EpisodeSpec
from vla_rl.placement.checks import load_checked_config

TWIN = Path(__file__).parent / "data/lerobot_twin"
SPEC = env_spec(CONFIG)


@pytest.fixture(scope="module")
def episodes() -> list[EpisodeData]:
    env = TabletopVectorEnv(CONFIG, 1)
    return [play(env, number, spoiled=number % 5 == 4) for number in range(5)]


def read(root: Path, **keys: object) -> Demonstrations:
    spec = TabletopVectorEnv(CONFIG, 1).spec
    options = {"instructions": spec.instructions, "views": spec.views, "image_size": 64, "proprio": spec.proprio_dim}
    return read_demonstrations([root], **options | keys)  # type: ignore[arg-type]


def assert_holds(found: Demonstrations, episodes: list[EpisodeData], instructions: tuple[str, ...]) -> None:
    assert [episode.success for episode in episodes].count(False) == 1, "which is no demonstration"
    kept = [episode for episode in episodes if episode.success]
    assert found.num_demonstrations == len(kept)
    for d, episode in enumerate(kept):
        rows = slice(found.offsets[d], found.offsets[d + 1])
        assert np.array_equal(found.proprio[rows], episode.proprio)
        assert np.allclose(found.actions[rows], episode.actions, atol=1e-6)
        assert {instructions[task] for task in found.task[rows]} == {episode.instruction}
        difference = np.abs(found.images[rows].astype(int) - episode.images).mean((1, 2, 3, 4))
        assert difference.max() < 5.0, "levels of 255: videos lose a little"
        others = np.abs(found.images[rows][:-2].astype(int) - episode.images[2:]).mean((1, 2, 3, 4))
        assert others.mean() > difference.mean() + 0.3, "each frame is its own, not its neighbour"


def test_a_data_set_that_lerobot_has_written_is_read(episodes: list[EpisodeData]) -> None:
    assert_holds(read(TWIN), episodes, TabletopVectorEnv(CONFIG, 1).spec.instructions)
    small = read(TWIN, image_size=32, proprio=0)
    assert (small.images.shape[1:], small.proprio.shape[1]) == ((1, 32, 32, 3), 0)


def test_episodes_are_written_added_to_and_read(tmp_path: Path, episodes: list[EpisodeData]) -> None:
    for episode in episodes[:2]:
        save_episode(tmp_path, episode, SPEC)
    assert add_pending(tmp_path, SPEC) == 2
    assert add_pending(tmp_path, SPEC) == 2, "nothing is pending"
    for episode in episodes[2:]:
        save_episode(tmp_path, episode, SPEC)
    assert add_pending(tmp_path, SPEC) == 5
    assert_holds(read(tmp_path), episodes, TabletopVectorEnv(CONFIG, 1).spec.instructions)
    info, theirs = (json.loads((root / "meta/info.json").read_text()) for root in (tmp_path, TWIN))
    assert info.keys() >= theirs.keys() - {"tools"}
    assert info["features"].keys() == theirs["features"].keys()
    for name, feature in info["features"].items():
        assert (feature["dtype"], feature["shape"]) == (
            theirs["features"][name]["dtype"],
            theirs["features"][name]["shape"],
        )
    assert (info["total_episodes"], info["total_frames"]) == (theirs["total_episodes"], theirs["total_frames"])
    for file in ("tasks.parquet", "episodes/chunk-000/file-000.parquet"):
        ours, reference = (pq.read_schema(root / "meta" / file) for root in (tmp_path, TWIN))
        columns = {name for name in reference.names if not name.startswith("stats/")}
        assert columns - set(ours.names) <= {"__index_level_0__"}
    stats, reference = (json.loads((root / "meta/stats.json").read_text()) for root in (tmp_path, TWIN))
    for name in ("action", "observation.state"):
        for value in ("min", "max", "mean", "std", "count"):
            assert np.allclose(stats[name][value], reference[name][value], atol=1e-4), (name, value)
    assert np.allclose(
        stats["observation.images.image"]["mean"], reference["observation.images.image"]["mean"], atol=0.02
    )


def test_what_a_killed_process_has_begun_to_add_is_added_once(
    tmp_path: Path, episodes: list[EpisodeData], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_episode(tmp_path, episodes[0], SPEC)
    add_pending(tmp_path, SPEC)
    save_episode(tmp_path, episodes[1], SPEC)
    (tmp_path / "pending/.0.partial").mkdir()  # of a process that was killed while it saved

    def killed(path: Path, value: object) -> None:
        if path.name == "vla_rl.json":
            raise KeyboardInterrupt
        write_json(path, value)

    monkeypatch.setattr(lerobot_writer, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        add_pending(tmp_path, SPEC)
    monkeypatch.undo()
    assert add_pending(tmp_path, SPEC) == 2
    found = read(tmp_path)
    assert found.num_demonstrations == 2
    assert np.array_equal(found.proprio[found.offsets[1] :], episodes[1].proprio)
    assert json.loads((tmp_path / "meta/info.json").read_text())["total_frames"] == len(found.actions)


def test_a_recorded_simulator_behaves_alike_and_keeps_failures(tmp_path: Path) -> None:
    config = TabletopConfig(tasks=("reach",), image_size=32, max_episode_steps=10)
    plain, recorded = (
        TabletopVectorEnv(config, 2),
        RecordedEnv(TabletopVectorEnv(config, 2), tmp_path, evaluations_only=True),
    )
    specs = [EpisodeSpec(0, 0, 5, evaluation=True), EpisodeSpec(1, 1, 6)]
    rng = np.random.default_rng(0)
    for env in (plain, recorded):
        env.reset([0, 1], specs)
    actions = rng.uniform(-1, 1, (3, 2, 4, 7)).astype(np.float32)
    running = [0, 1]
    for chunk in actions:
        ours, theirs = (env.step(running, chunk[running]) for env in (recorded, plain))
        for name in ("rewards", "num_steps", "terminated", "truncated", "success"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        running = [e for i, e in enumerate(running) if not (ours.terminated | ours.truncated)[i]]
    assert not running
    assert add_pending(tmp_path, env_spec(config)) == 1, "the training episode is left alone"
    table = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    assert table.num_rows == 10
    assert np.allclose(np.array(table["action"].to_pylist())[:, :6], actions[:, 0].reshape(-1, 7)[:10, :6])
    assert table["next.done"].to_pylist() == [False] * 9 + [True]
    assert table["next.success"].to_pylist() == [False] * 10
    with pytest.raises(DemonstrationError, match="holds no successful episode"):
        read(tmp_path, image_size=32)


def test_other_observations_go_to_another_folder(tmp_path: Path, episodes: list[EpisodeData]) -> None:
    save_episode(tmp_path, episodes[0], SPEC)
    add_pending(tmp_path, SPEC)
    save_episode(tmp_path, replace(episodes[1], proprio=episodes[1].proprio[:, :3]), SPEC)
    with pytest.raises(UserError, match="other observations or actions: write to another folder"):
        add_pending(tmp_path, SPEC)


def _edited(root: Path, name: str, value: object) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    info[name] = value
    (root / "meta/info.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("spoil", "keys", "message"),
    [
        (
            lambda root: _edited(root, "codebase_version", "v3.1"),
            {},
            "format v3.1, this reads v2.0, v2.1, v3.0",
        ),
        (
            lambda root: None,
            {"views": ("a", "b")},
            r"view b: set demos.cameras=\{b: NAME\}",
        ),
        (lambda root: None, {"proprio": 8}, r"episode 0 has proprioception of shape \(\d+, 5\), expected \(\d+, 8\)"),
        (lambda root: None, {"instructions": ("fold it",)}, "holds no demonstration of the tasks"),
        (lambda root: shutil.rmtree(root / "videos"), {}, "cannot be read as a LeRobot data set"),
        (lambda root: (root / "meta/tasks.parquet").write_text("no"), {}, "cannot be read as a LeRobot data set"),
        (lambda root: (root / "meta/info.json").write_text("{"), {}, "cannot be read as a LeRobot data set"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, spoil, keys: dict, message: str) -> None:
    root = shutil.copytree(TWIN, tmp_path / "twin")
    spoil(root)
    with pytest.raises(DemonstrationError, match=message):
        read(root, **keys)


def test_another_convention_of_the_gripper_is_refused(tmp_path: Path, episodes: list[EpisodeData]) -> None:
    converted = episodes[0].actions.copy()
    converted[:, -1] = np.linspace(0.5, 0.0, len(converted))  # is written as 0 .. 1
    save_episode(tmp_path, replace(episodes[0], actions=converted), SPEC)
    add_pending(tmp_path, SPEC)
    assert read(tmp_path).num_demonstrations == 1, "this writer's own convention is known"
    (tmp_path / "meta/vla_rl.json").unlink()
    with pytest.raises(DemonstrationError, match="goes from 0 to 1"):
        read(tmp_path)


def test_without_its_libraries_the_mistake_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.base.lerobot_format.importlib.util.find_spec", lambda name: None)
    with pytest.raises(DemonstrationError, match=r"needs av, pyarrow: pip install av pyarrow"):
        read(TWIN)
    with pytest.raises(UserError, match=r"log.dataset.*needs av, pyarrow: pip install av pyarrow"):
        load_checked_config(None, ["env=tabletop", "log.dataset=data"])
