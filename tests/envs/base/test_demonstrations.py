"""Demonstration files: what is written, what is read, and LIBERO's own files."""

import json

import h5py
import numpy as np
import pytest

from envs.base import EnvError, VectorEnv
from envs.base.demonstration_records import DemonstrationError, Demonstrations
from envs.base.demonstrations import CollectCounts, collect, read_demonstrations
from envs.libero.config import LiberoConfig
from envs.tabletop.config import TabletopConfig
from envs.tabletop.env import TabletopVectorEnv
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec, EpisodeSpec, StepResult

SIZE = 8


class ScriptedEnv(VectorEnv):
    """Frames that count the steps; an expert that always answers the same; remembers what was executed."""

    def __init__(self, length=4, fails=(), views=("main", "wrist")):
        self.spec = EnvSpec("scripted", views, SIZE, 2, end_effector(), length, ("do it", "do that"), assets="paper")
        self.num_envs = 1
        self.length, self.fails = length, fails
        self.executed = []

    def reset(self, env_ids, episodes):
        self.episode, self.count = episodes[0], 0
        self.executed.append([])

    def step(self, env_ids, actions):
        self.executed[-1].append(actions[0, 0].copy())
        self.count += 1
        done, ok = self.count == self.length, self.episode.id not in self.fails
        success = np.array([done and ok])
        return StepResult(
            success[None].astype(np.float32), np.ones(1, np.int32), success, np.array([done and not ok]), success
        )

    def observe(self, env_ids, out):
        out.images[0] = self.count
        out.images[0, :, 0, 0] = (250, 251, 252)  # a marked corner shows rotations
        out.proprio[0] = (self.count, -self.count)
        out.task[0] = self.episode.task

    def frames(self, env_id):
        return []

    def potential(self, env_ids):
        raise EnvError("none")

    def expert_action(self, env_id):
        return np.array([0.5, -0.25, 0, 0, 0, 0, float(self.count < 2)], np.float32)

    def close(self):
        pass


def episodes(count, task=0):
    return [EpisodeSpec(id=i, task=task, seed=i) for i in range(count)]


def read(paths, spec, **keys):
    wanted = {
        "instructions": spec.instructions,
        "views": spec.views,
        "image_size": spec.image_size,
        "proprio": spec.proprio_dim,
    }
    return read_demonstrations(paths, **(wanted | keys))


def test_what_is_written_comes_back(tmp_path):
    env, path, seen = ScriptedEnv(), tmp_path / "new" / "demo.hdf5", []
    counts = collect(env, episodes(3), path, progress=seen.append)
    assert counts == CollectCounts(episodes=3, successes=3, written=3, steps=12)
    assert [c.episodes for c in seen] == [1, 2, 3]
    demos = read([path], env.spec)
    assert demos.num_demonstrations == 3
    assert demos.offsets.tolist() == [0, 4, 8, 12]
    assert demos.images.shape == (12, 2, SIZE, SIZE, 3)
    assert demos.images[:4, 0, 5, 5, 0].tolist() == [0, 1, 2, 3]  # the observation before each action
    assert demos.images[2, 1, 0, 0].tolist() == [250, 251, 252]  # upright again
    assert demos.proprio[:4].tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
    assert demos.actions[:4, 6].tolist() == [1, 1, 0, 0]
    assert demos.actions[0, :2].tolist() == [0.5, -0.25]
    assert demos.task.tolist() == [0] * 12
    assert not list(tmp_path.glob("**/*.partial"))


def test_the_layout_is_libero_s(tmp_path):
    path = tmp_path / "demo.hdf5"
    collect(ScriptedEnv(), episodes(2, task=1), path)
    with h5py.File(path) as file:
        data, demo = file["data"], file["data/demo_1"]
        assert json.loads(data.attrs["problem_info"])["language_instruction"] == "do that"
        assert (data.attrs["num_demos"], data.attrs["total"], data.attrs["assets"]) == (2, 8, "paper")
        assert demo.attrs["num_samples"] == 4
        assert demo["actions"][:, 6].tolist() == [-1, -1, 1, 1]  # robosuite: -1 open, 1 closed
        assert demo["obs/agentview_rgb"][0, -1, -1].tolist() == [250, 251, 252]  # as robosuite renders: turned
        assert demo["dones"][()].tolist() == [0, 0, 0, 1]
        assert demo["rewards"][()].tolist() == [0, 0, 0, 1]


def test_noise_is_executed_and_the_expert_is_recorded(tmp_path):
    env, path = ScriptedEnv(length=200), tmp_path / "demo.hdf5"
    collect(env, episodes(1), path, noise=0.2)
    demos = read([path], env.spec)
    extra = np.array(env.executed[0]) - demos.actions
    assert np.abs(demos.actions[:, 0] - 0.5).max() == 0
    assert np.abs(extra[:, 6]).max() < 1e-6  # never on the gripper
    assert 0.1 < extra[:, :3].std() < 0.3
    assert 0 < extra[:, 3:6].std() < 0.5 * extra[:, :3].std()
    assert np.corrcoef(extra[:-1, 0], extra[1:, 0])[0, 1] > 0.4
    again = ScriptedEnv(length=200)
    collect(again, episodes(1), path, noise=0.2)
    assert np.array_equal(env.executed, again.executed)


def test_failures_are_left_out_unless_wanted(tmp_path):
    env, path = ScriptedEnv(fails={0, 2}), tmp_path / "demo.hdf5"
    assert collect(env, episodes(3), path) == CollectCounts(episodes=3, successes=1, written=1, steps=4)
    assert collect(env, episodes(3), path, keep_failures=True).written == 3
    with h5py.File(path) as file:
        assert [bool(file[f"data/demo_{i}"].attrs["success"]) for i in range(3)] == [False, True, False]
        assert file["data/demo_0/rewards"][()].tolist() == [0, 0, 0, 0]
    missing = tmp_path / "none.hdf5"
    with pytest.raises(DemonstrationError, match="none of 2 episodes succeeded"):
        collect(ScriptedEnv(fails={0, 1}), episodes(2), missing)
    assert list(tmp_path.iterdir()) == [path]


def test_tasks_are_found_by_instruction(tmp_path):
    env, first, second = ScriptedEnv(), tmp_path / "a.hdf5", tmp_path / "b.hdf5"
    collect(env, episodes(1, task=1), first)
    collect(env, [*episodes(1, task=0), *episodes(1, task=1)], second)
    demos = read([first, second], env.spec)
    assert demos.task[demos.offsets[:-1]].tolist() == [1, 0, 1]
    assert read([second], env.spec, instructions=("do that",)).num_demonstrations == 1
    with pytest.raises(DemonstrationError, match=r"a\.hdf5 holds no demonstration of the tasks \['dance'\].*'do that'"):
        read([first], env.spec, instructions=("dance",))


def test_chunks_stay_within_their_demonstration():
    actions = np.arange(5, dtype=np.float32)[:, None]
    demos = Demonstrations(
        np.zeros((5, 1, 1, 1, 3), np.uint8),
        np.zeros((5, 0), np.float32),
        actions,
        np.zeros(5, np.int32),
        np.array([0, 2, 5]),
    )
    targets, mask = demos.chunks(3)
    assert targets[:, :, 0].tolist() == [[0, 1, 1], [1, 1, 1], [2, 3, 4], [3, 4, 4], [4, 4, 4]]
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]


@pytest.fixture
def official(tmp_path):
    """A file as LIBERO's data sets have it: frame j shows what action j led to."""
    path = tmp_path / "KITCHEN_SCENE3_put_the_pan_on_the_stove_demo.hdf5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["macros_image_convention"] = "opengl"
        data.attrs["problem_info"] = json.dumps({"language_instruction": "another sentence"})
        for number, length in ((10, 3), (2, 6)):  # stored in alphabetical order, meant in numerical
            demo = data.create_group(f"demo_{number}")
            actions = rng.uniform(-1, 1, (length, 7))
            actions[:, 6] = [-1, -1, -1, 1, 1, 1][:length]
            actions[2, :6] = 0
            demo["actions"] = actions
            obs = demo.create_group("obs")
            frames = np.zeros((length, 12, 12, 3), np.uint8)
            frames[:, -1, -1] = 10 * np.arange(1, length + 1)[:, None]
            obs["agentview_rgb"], obs["eye_in_hand_rgb"] = frames, frames + 1
            obs["ee_states"] = np.tile(np.arange(length)[:, None], (1, 6)) + 0.5
            obs["gripper_states"] = np.full((length, 2), 0.04)
    return path


def test_official_files_are_realigned_and_converted(official):
    with h5py.File(official) as file:
        raw = file["data/demo_2/actions"][()]
    keys = {"instructions": ("put the pan on the stove",), "views": ("agentview",), "proprio": 8}
    demos = read_demonstrations([official], image_size=12, **keys)
    assert demos.offsets.tolist() == [0, 5, 7]
    assert np.allclose(demos.actions[:5, :6], raw[1:, :6])
    assert demos.actions[:5, 6].tolist() == [1, 1, 0, 0, 0]  # -1 was open
    assert demos.images[:5, 0, 0, 0, 0].tolist() == [10, 20, 30, 40, 50]
    assert demos.proprio[:5, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    both = read_demonstrations([official], image_size=6, **(keys | {"views": ("agentview", "wrist"), "proprio": 0}))
    assert both.images.shape == (7, 2, 6, 6, 3)
    assert both.proprio.shape == (7, 0)


def test_noops_can_be_left_out(official):
    keys = {"instructions": ("put the pan on the stove",), "views": ("agentview",), "proprio": 0, "image_size": 12}
    demos = read_demonstrations([official], drop_noops=True, **keys)
    assert demos.offsets.tolist() == [0, 4, 5]  # action 2 neither moves nor changes the gripper
    assert demos.images[:4, 0, 0, 0, 0].tolist() == [10, 30, 40, 50]
    assert (np.linalg.norm(demos.actions[:, :6], axis=1) > 0).all()


def test_unusable_files_are_named(tmp_path, official):
    spec = ScriptedEnv().spec
    with pytest.raises(DemonstrationError, match=r"missing\.hdf5 cannot be read"):
        read([tmp_path / "missing.hdf5"], spec)
    broken = tmp_path / "broken.hdf5"
    broken.write_bytes(b"no HDF5")
    with pytest.raises(DemonstrationError, match=r"broken\.hdf5 cannot be read"):
        read([broken], spec)
    with h5py.File(broken, "w") as file:
        file["other"] = [1]
    with pytest.raises(DemonstrationError, match=r"broken\.hdf5 cannot be read"):
        read([broken], spec)
    with pytest.raises(DemonstrationError, match="no demonstration files"):
        read([], spec)
    one_view = tmp_path / "one.hdf5"
    collect(ScriptedEnv(views=("main",)), episodes(1), one_view)
    with pytest.raises(DemonstrationError, match=r"none or several of them may be the view wrist"):
        read([one_view], spec)
    with pytest.raises(DemonstrationError, match=r"has proprioception of shape \(4, 2\), expected \(4, 8\)"):
        read([one_view], spec, views=("main",), proprio=8)
    with pytest.raises(DemonstrationError, match="2 views at most"):
        collect(ScriptedEnv(views=("a", "b", "c")), episodes(1), tmp_path / "three.hdf5")


def test_the_tabletop_uses_the_same_files(tmp_path):
    env = TabletopVectorEnv(TabletopConfig(tasks=("reach",), image_size=32), 1)
    path = tmp_path / "demo.hdf5"
    counts = collect(env, episodes(3), path, noise=0.1)
    demos = read([path], env.spec)
    assert len(demos.actions) == counts.steps
    assert demos.proprio.shape == (counts.steps, env.spec.proprio_dim)
    assert demos.images.shape == (counts.steps, 1, 32, 32, 3)


@pytest.mark.libero
def test_libero_demonstrations_replay(tmp_path):
    """Without noise, the recorded actions lead from the recorded first state through the recorded ones to success."""
    from envs.libero.env import LiberoVectorEnv

    env = LiberoVectorEnv(LiberoConfig(suite="libero_object", tasks=(0,), image_size=16, wrist_camera=True), 1)
    path = tmp_path / "demo.hdf5"
    collect(env, [EpisodeSpec(id=0, task=0, seed=9)], path)
    demos = read([path], env.spec)
    assert demos.proprio.shape[1] == 8
    with h5py.File(path) as file:
        demo = file["data/demo_0"]
        states = demo["states"][()]
        assert {*demo["obs"]} == {
            *("agentview_rgb", "eye_in_hand_rgb"),
            *("ee_pos", "ee_ori", "ee_states", "gripper_states", "joint_states"),
        }
        assert demo["robot_states"].shape == (len(states), 9)
    env.reset([0], [EpisodeSpec(id=1, task=0, seed=9)])
    for state, action in zip(states, demos.actions, strict=True):
        assert np.array_equal(env.demo_state(0)["states"], state)
        result = env.step([0], action[None, None])
    assert result.success[0]
    env.close()


@pytest.mark.libero
def test_collecting_without_an_expert_leaves_no_file(tmp_path):
    from envs.libero.env import LiberoVectorEnv

    env = LiberoVectorEnv(LiberoConfig(suite="libero_goal", tasks=(7,), image_size=16), 1)
    with pytest.raises(EnvError, match="no scripted expert"):
        collect(env, episodes(1), tmp_path / "demo.hdf5")
    assert not list(tmp_path.iterdir())
    env.close()
