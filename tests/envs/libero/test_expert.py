"""The scripted expert solves real tasks, and says which ones it cannot."""

import mujoco
import numpy as np
import pytest

from envs.base import EnvError
from envs.libero.config import LiberoConfig
from envs.libero.env import LiberoVectorEnv
from envs.libero.expert.expert import Expert
from envs.libero.expert.grasping import HeightMap, closing_axis, find_grasp
from vla_rl.core.records import EpisodeSpec

TABLE = 0.4  # metres above the floor


def solve(env, episode, noise=0.0):
    """Success and length of one expert episode."""
    rng = np.random.default_rng(episode.seed)
    env.reset([0], [episode])
    for step in range(1, 1000):
        action = env.expert_action(0)
        action[:6] += (noise * rng.normal(size=6)).astype(np.float32)
        result = env.step([0], action[None, None])
        if result.terminated[0] or result.truncated[0]:
            return bool(result.success[0]), step
    raise AssertionError("the episode did not end")


@pytest.mark.libero
@pytest.mark.parametrize(
    ("suite", "number", "init_state", "noise"),
    [("libero_spatial", 2, 7, 0.0), ("libero_object", 3, None, 0.2), ("libero_goal", 8, None, 0.0)],
)
def test_solves(suite, number, init_state, noise):
    env = LiberoVectorEnv(LiberoConfig(suite=suite, tasks=(number,), image_size=16), 1)
    success, steps = solve(env, EpisodeSpec(id=0, task=0, seed=4, init_state=init_state), noise)
    assert success
    assert steps < 150
    env.close()


@pytest.mark.libero
def test_two_goals_in_sequence():
    env = LiberoVectorEnv(LiberoConfig(suite="libero_10", tasks=(0,), image_size=16), 1)
    assert solve(env, EpisodeSpec(id=0, task=0, seed=0, init_state=3))[0]
    env.close()


@pytest.mark.libero
@pytest.mark.parametrize("seed", [0, 1])
def test_two_that_take_turns_agree(seed):
    """Each finds what the other has done meanwhile, and goes on from there."""
    env = LiberoVectorEnv(LiberoConfig(tasks=(0,), image_size=16), 1)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=seed, init_state=None)])
    instance = env.instance(0)
    experts = [Expert(instance.scene.model, instance.state) for _ in range(2)]
    for step in range(150):
        result = env.step([0], experts[step // 8 % 2].action()[None, None])
        if result.success[0]:
            break
    assert result.success[0], "one of them lets go of what the other one has lifted"
    env.close()


@pytest.mark.libero
@pytest.mark.parametrize(
    ("suite", "number", "reason"),
    [
        ("libero_goal", 7, r"no scripted expert for libero_goal/7 .*turnon flat_stove_1"),
        ("libero_10", 3, r"no scripted expert for libero_10/3 .*close"),
        ("libero_goal", 3, r"wooden_cabinet_1_top_region is closed from above"),
    ],
)
def test_tasks_without_a_plan_are_named(suite, number, reason):
    env = LiberoVectorEnv(LiberoConfig(suite=suite, tasks=(number,), image_size=16), 1)
    env.reset([0], [EpisodeSpec(id=0, task=0, seed=0, init_state=0)])
    with pytest.raises(EnvError, match=reason):
        env.expert_action(0)
    env.close()


@pytest.mark.libero
@pytest.mark.slow
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object"])
@pytest.mark.parametrize("sampled", [False, True])
def test_solves_nine_in_ten_episodes(suite, sampled):
    env = LiberoVectorEnv(LiberoConfig(suite=suite, tasks=(), image_size=16), 1)
    results = [
        solve(env, EpisodeSpec(id=i, task=i % 10, seed=i, init_state=None if sampled else (11 * i) % 50))
        for i in range(20)
    ]
    assert np.mean([success for success, _ in results]) >= 0.9
    env.close()


# --- grasps on a scene of known shapes -------------------------------------------------------------------------------


def look_at(*geoms):
    """A height map and the target's root body, of shapes on a table."""
    xml = f"""<mujoco><worldbody>
      <geom type="box" size="0.5 0.5 {TABLE / 2}" pos="0 0 {TABLE / 2}"/>
      {"".join(geoms)}
    </worldbody></mujoco>"""
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    body = model.body("target").id
    return HeightMap(model, data, data.xipos[body], 0.17, 0.004), body, data.xipos[body]


def box(name, size, position=(0.0, 0.0), yaw=0.0, alpha=1.0):
    x, y, z = size
    return (
        f'<body name="{name}" pos="{position[0]} {position[1]} {TABLE + z}" euler="0 0 {yaw}"><freejoint/>'
        f'<geom type="box" size="{x} {y} {z}" rgba="1 0 0 {alpha}"/></body>'
    )


def test_heights_are_those_of_the_scene():
    heights, body, _ = look_at(box("target", (0.02, 0.05, 0.03), alpha=0))  # transparent to rays, but solid
    on_top, owner = heights.at(np.array([0.0, 0.04]))
    table, _ = heights.at(np.array([0.06, 0.0]))
    assert on_top == pytest.approx(TABLE + 0.06, abs=1e-6)
    assert table == pytest.approx(TABLE, abs=1e-6)
    assert owner == body
    assert heights.highest_in_corridor(np.array([-0.1, 0]), np.array([0.1, 0]), 0.01) == pytest.approx(TABLE + 0.06)
    assert heights.highest(np.array([0.1, 0.1]), 0.02) == pytest.approx(TABLE)


@pytest.mark.parametrize("yaw", [0, 30, 90])
def test_a_box_is_grasped_across_its_narrow_side(yaw):
    heights, body, centre = look_at(box("target", (0.06, 0.02, 0.03), yaw=yaw))
    grasp = find_grasp(heights, body, centre)
    narrow = np.array([-np.sin(np.radians(yaw)), np.cos(np.radians(yaw))])
    assert abs(closing_axis(grasp.yaw) @ narrow) > np.cos(np.radians(16))
    assert np.linalg.norm(grasp.position[:2]) < 0.02
    assert TABLE < grasp.position[2] < TABLE + 0.06


def test_a_neighbour_turns_the_grasp():
    """A square block could be closed on either way; a tall wall next to it leaves one."""
    wall = box("wall", (0.15, 0.005, 0.08), position=(0.0, 0.035))
    heights, body, centre = look_at(box("target", (0.02, 0.02, 0.02)), wall)
    grasp = find_grasp(heights, body, centre)
    assert abs(closing_axis(grasp.yaw)[1]) < 0.5


def test_what_is_too_wide_or_hidden_has_no_grasp():
    heights, body, centre = look_at(box("target", (0.1, 0.1, 0.03)))
    with pytest.raises(EnvError, match="fits nowhere"):
        find_grasp(heights, body, centre)
    roof = f'<geom type="box" size="0.2 0.2 0.01" pos="0 0 {TABLE + 0.3}"/>'
    heights, body, centre = look_at(box("target", (0.02, 0.02, 0.02)), roof)
    with pytest.raises(EnvError, match="cannot be seen from above"):
        find_grasp(heights, body, centre)
