"""What looks wrong with demonstrations is found and named, and nothing in right ones."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from rich.console import Console

from envs import env_spec, make_env
from envs.base.config import DemosConfig
from envs.base.demonstrations import collect, demonstrations_for
from envs.base.lerobot_writer import EpisodeData, add_pending, save_episode
from vla_rl.commands.demonstrations import demonstration_episode
from vla_rl.commands.inspect import compared, demos_command
from vla_rl.commands.sft import clone
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing

CONFIG = RunConfig(env={"name": "tabletop", "tasks": ["pick_place"], "image_size": 32})


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "right.hdf5"
    env = make_env(CONFIG.env, 1)
    collect(env, [demonstration_episode(i, 1, 0) for i in range(16)], path, noise=0.1)
    env.close()
    return path


def altered(right: Path, path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    with replacing(path) as partial:
        partial.write_bytes(right.read_bytes())
        with h5py.File(partial, "r+") as file:
            for demo in file["data"].values():
                demo[name][...] = change(demo[name][()])
    return path


def found_in(path: Path, config: RunConfig = CONFIG) -> list[tuple[str, bool]]:
    demos = demonstrations_for(env_spec(config.env), [path], config.demos)
    return [(finding.text, finding.certain) for finding in compared(config, demos)[1]]


def gripper_turned(actions: np.ndarray) -> np.ndarray:
    return actions * np.where(np.arange(actions.shape[1]) == actions.shape[1] - 1, -1, 1)


IMAGES = "obs/agentview_rgb"
PLANTED = {
    "rotated by 180 degrees": (IMAGES, lambda x: x[:, ::-1, ::-1], True),
    "upside down": (IMAGES, lambda x: x[:, ::-1], True),
    "mirrored left to right": (IMAGES, lambda x: x[:, :, ::-1], False),
    "blue and red swapped": (IMAGES, lambda x: x[..., ::-1], False),
    "demos.gripper=[OPEN,CLOSED]": ("actions", gripper_turned, False),
    "another unit": ("actions", lambda x: x * np.r_[np.full(6, 0.01), 1.0], False),
    "stored after its action": ("actions", lambda x: np.roll(x, 1, axis=0), False),
    "may mean something else": ("obs/proprio", lambda x: x + np.eye(x.shape[1])[0] * 9, False),
}


@pytest.mark.parametrize("words", PLANTED)
def test_what_is_planted_is_named_first(words: str, right: Path, tmp_path: Path) -> None:
    name, change, certain = PLANTED[words]
    found = found_in(altered(right, tmp_path / "planted.hdf5", name, change))
    assert words in found[0][0]
    assert found[0][1] or not certain


def test_nothing_is_wrong_with_right_data(right: Path, tmp_path: Path) -> None:
    assert found_in(right) == []
    spec = env_spec(CONFIG.env)
    demos = demonstrations_for(spec, [right], DemosConfig())
    for start, end in zip(demos.offsets[:3], demos.offsets[1:4], strict=True):
        arrays = demos.images[start:end], demos.proprio[start:end], demos.actions[start:end]
        save_episode(
            tmp_path, EpisodeData(spec.instructions[0], *arrays, np.zeros(end - start, np.float32), True), spec
        )
    add_pending(tmp_path, spec)
    assert found_in(tmp_path) == []
    info = tmp_path / "meta/info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fps": 10}))
    ((text, certain),) = found_in(tmp_path)
    assert ("10 frames a second, the simulator 20" in text, certain) == (True, False)


def test_the_command_shows_and_sft_refuses(right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted = altered(right, tmp_path / "planted.hdf5", *PLANTED["upside down"][:2])
    keys = {"sft": {"demos": [str(planted)], "output": str(tmp_path / "clone")}}
    with pytest.raises(UserError, match=r"upside down.*demos\.check=false"):
        clone(CONFIG.model_copy(update={"sft": CONFIG.sft.model_copy(update=keys["sft"])}), Console(quiet=True))
    assert not (tmp_path / "clone").exists()
    overrides = ["env.tasks=[pick_place]", "env.image_size=32"]
    args = argparse.Namespace(data=right, config="tabletop", overrides=overrides, output=None, json=None)
    assert demos_command(args) == 0
    assert "nothing looks wrong" in capsys.readouterr().out
    args = argparse.Namespace(
        **vars(args) | {"data": planted, "output": tmp_path / "p.png", "json": tmp_path / "p.json"}
    )
    assert demos_command(args) == 1
    assert "gripper" in capsys.readouterr().out
    assert json.loads(args.json.read_text())["findings"][0]["certain"]
    assert args.output.stat().st_size > 10_000
