"""Where objects come to rest decides results: the audit, its reference, and starts from the reference's states."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs import make_env
from envs.libero.audit import difference, settle
from envs.libero.config import LiberoConfig
from envs.libero.protocol import settled
from envs.libero.protocol.tasks import load_init_states, suite_tasks
from tests import ROOT
from vla_rl.core.records import EpisodeSpec

pytestmark = pytest.mark.libero

TASK = suite_tasks("libero_spatial")[5]
STAYS = "test_what_has_settled_stays_there_under_any_mujoco"
NEWER = Path(sys.prefix) / "newer_mujoco"
own_assets = pytest.mark.skipif("LIBERO_ASSETS" not in os.environ, reason="placeholders come to rest elsewhere")


def with_states(states, folder):
    """The task, with these initial states."""
    data = io.BytesIO()
    pickle.dump(np.ascontiguousarray(states), data)
    with zipfile.ZipFile(folder / "states", "w") as archive:
        archive.writestr("archive/data.pkl", data.getvalue())
    return replace(TASK, init_states_file=folder / "states")


def test_a_state_moved_by_a_centimetre_is_named(tmp_path):
    original, goal = settle(TASK, 2)
    states = load_init_states(TASK)[:2].copy()
    bowl = 1 + int(original.qpos[list(original.objects).index("akita_black_bowl_2")])
    states[1, bowl + 1] += 0.01
    moved, _ = settle(with_states(states, tmp_path))
    found = difference(moved, goal, original)
    assert (found.object, found.states) == ("akita_black_bowl_2", 1)
    assert found.worst_mm == pytest.approx(10, abs=3)
    assert difference(original, goal, original) == (0.0, original.objects[0], 0, False)


@pytest.mark.parametrize("implementation", ["fast", "reference"])
def test_episodes_start_where_the_reference_has_its_objects(implementation):
    config = LiberoConfig(tasks=(5,), image_size=32, settled="reference", settle_steps=0, implementation=implementation)
    env = make_env(config, 1)
    starts = []
    for seed in (3, 4):  # a seed places fixtures, which the reference's states belong to
        env.reset([0], [EpisodeSpec(id=0, task=0, seed=seed, init_state=7)])
        fast = implementation == "fast"
        starts.append(env.demo_state(0)["states"] if fast else env.instance(0).env.env.get_sim_state())
    env.close()
    expected, own = settled.settled_init_states(TASK)[7], load_init_states(TASK)[7]
    assert np.array_equal(starts[0], expected)
    assert np.array_equal(starts[1], expected)
    changed = np.abs(expected - own) > 1e-3
    assert changed.any()
    assert not changed[1:10].any()  # the robot's joints


@own_assets
@pytest.mark.parametrize("number", [0, 3])  # with a bottle of ketchup that newer versions throw, and one of wine
def test_what_has_settled_stays_there_under_any_mujoco(number):
    env = make_env(LiberoConfig(suite="libero_10", tasks=(number,), image_size=32, settled="reference"), 1)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=3, init_state=0)])
    state = env.demo_state(0)["states"]
    env.close()
    own = settled.reference(f"libero_10/{number}")
    now = np.stack([state[1 + first : 4 + first] for first in own.qpos])
    assert np.abs(now - own.poses[0, :, :3]).max() < 1e-3


@own_assets
def test_this_mujoco_lets_objects_rest_as_published():
    found = difference(*settle(TASK, 2), settled.reference(str(TASK)))
    assert found.states == 0
    assert found.worst_mm < 0.1


@own_assets
@pytest.mark.skipif(not NEWER.is_dir(), reason="bash scripts/setup.sh --test installs a newer MuJoCo")
def test_the_audit_names_what_a_newer_mujoco_moves(tmp_path):
    """And the fast environment equals the reference environment under that version, too."""
    path = os.pathsep.join([str(NEWER), str(ROOT)])
    newer = os.environ | {"PYTHONPATH": path, "VLA_RL_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "vla_rl.commands.cli", "audit", "libero", "--suite=libero_spatial", "--states=1"]
    done = subprocess.run(command, env=newer, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "MuJoCo 3.8.1" in done.stdout
    named = [line for line in done.stdout.splitlines() if "libero_spatial/5" in line]
    assert len(named) == 1
    assert "yes" in named[0]


@pytest.mark.skipif(not NEWER.is_dir(), reason="bash scripts/setup.sh --test installs a newer MuJoCo")
def test_a_newer_mujoco_works_as_well():
    """The fast environment equals the reference environment, and the reference's states stay put."""
    newer = os.environ | {"PYTHONPATH": os.pathsep.join([str(NEWER), str(ROOT)])}
    tests = "test_exactness.py::test_equals_the_reference_environment", f"{Path(__file__).name}::{STAYS}"
    paths = [f"tests/envs/libero/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, env=newer, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


def test_a_run_says_which_tasks_fail_the_audit(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(settled, "installed", lambda: "3.8.1")
    note = settled.resting_note([TASK])
    assert "libero_spatial/5, akita_black_bowl_1 by up to 35 mm (50 initial states)" in note
    assert "env.settled=reference" in note
    assert settled.resting_note([suite_tasks("libero_spatial")[1]]) is None
    monkeypatch.setattr(settled, "installed", lambda: "9.9.9")
    assert "vla-rl audit libero" in settled.resting_note([TASK])
    settled.keep_audit({str(TASK): {"worst_mm": 12.3, "object": "plate_1", "states": 4, "target": False}})
    assert "plate_1 by up to 12 mm (4 initial states)" in settled.resting_note([TASK])
