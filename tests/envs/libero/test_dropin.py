"""Fast LIBERO by itself: the numbers of hf-libero's environment, without torch, Ray and DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.base import EnvError
from envs.libero.bootstrap import import_libero
from envs.libero.dropin import OffScreenRenderEnv, get_benchmark_dict
from envs.libero.protocol.tasks import suite_tasks

pytestmark = pytest.mark.libero
SIZE = 32
# Runs in a process in which these packages are not installed.
ALONE = """
import sys
class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        absent = name.split(".")[0] in {"torch", "ray", "deepspeed", "transformers"}
        return None if absent else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import gymnasium, numpy as np
import envs.gymnasium.registration
from envs.libero.dropin import OffScreenRenderEnv, get_benchmark_dict
suite = get_benchmark_dict()["libero_spatial"]()
env = OffScreenRenderEnv(bddl_file_name=suite.get_task_bddl_file_path(0), camera_heights=32, camera_widths=32)
env.seed(0)
env.reset()
obs = env.set_init_state(suite.get_task_init_states(0)[0])
print(obs["agentview_image"].shape, len(suite.get_task_init_states(0)), suite.get_task(0).language)
env.close()
both = gymnasium.make_vec("vla_rl/LiberoSpatial-v0", num_envs=2, image_size=32, tasks=(0,), settle_steps=0)
seen, info = both.reset(seed=1)
seen, reward, *_ = both.step(both.action_space.sample())
print(seen["agentview"].shape, seen["state"].shape, info["instruction"][1])
both.close()
"""


def test_it_runs_without_the_packages_of_training() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    instruction = "pick up the black bowl between the plate and the ramekin and place it on the plate"
    assert done.stdout.splitlines()[-2:] == [f"(32, 32, 3) 50 {instruction}", f"(2, 32, 32, 3) (2, 8) {instruction}"]


def _same_reading(theirs: Any, ours: OffScreenRenderEnv) -> None:
    """What vla-eval's benchmark reads of the controller."""
    for name in ("ee_pos", "ee_ori_mat"):
        expected, found = (getattr(env.robots[0].controller, name) for env in (theirs, ours))
        assert np.array_equal(expected, found), name


@pytest.mark.parametrize(("suite", "number"), [("libero_10", 3)])
def test_it_equals_hf_libero(suite: str, number: int) -> None:
    """Also after its second reset, for which it draws the joints three times."""
    import_libero()
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv as Original

    task = suite_tasks(suite)[number]
    arguments = {"bddl_file_name": str(task.bddl_file), "camera_heights": SIZE, "camera_widths": SIZE}
    theirs, ours = Original(**arguments), OffScreenRenderEnv(**arguments, joint_draws="as_hf_libero")
    once = OffScreenRenderEnv(**arguments, use_camera_obs=False)
    state = get_benchmark_dict()[suite]().get_task_init_states(number)[7]
    rng = np.random.default_rng(0)
    try:
        for start in (None, state):
            for env in (ours, once, theirs):
                env.seed(11)
                if env is theirs:
                    theirs.env.sim._render_context_offscreen.gl_ctx.make_current()
                env.reset()
                if start is not None:
                    env.set_init_state(start)
            _same_reading(theirs, ours)  # the controller has not read the initial state yet
            for _ in range(3):
                action = rng.uniform(-1, 1, 7)
                theirs.env.sim._render_context_offscreen.gl_ctx.make_current()  # each has its own, and draws in it
                expected, reward, done, _ = theirs.step(action)
                seen, our_reward, our_done, _ = ours.step(action)
                assert (reward, done) == (our_reward, our_done)
                assert seen.keys() <= expected.keys()
                different = [name for name in seen if not np.array_equal(seen[name], expected[name])]
                assert not different
            assert np.array_equal(theirs.get_sim_state(), ours.get_sim_state())
            _same_reading(theirs, ours)
            cabinet = ours._model.model.body_pos[ours._model._fixtures]
            assert not np.array_equal(cabinet, once._model.model.body_pos[once._model._fixtures])
    finally:
        for env in (theirs, ours, once):
            env.close()


def test_images_can_wait_until_they_are_read() -> None:
    task = suite_tasks("libero_spatial")[0]
    size = {"camera_heights": SIZE, "camera_widths": SIZE}
    lazy, eager = (OffScreenRenderEnv(task.bddl_file, **size, lazy_images=wait) for wait in (True, False))
    seen = []
    for env in (lazy, eager):
        env.seed(3)
        seen.append(env.reset())
        env.step([0.5] * 7)
    first, shown = seen
    assert "agentview_image" not in first
    assert np.array_equal(first["agentview_image"], shown["agentview_image"]), "of the moment of the observation"
    with pytest.raises(KeyError, match="nose_image"):
        first["nose_image"]
    for env in (lazy, eager):
        env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"controller": "JOINT_POSITION"}, "only 'OSC_POSE'"),
        ({"control_freq": 10}, "only 20"),
        ({"camera_heights": 64}, "64x128"),
        ({"colour": 1}, "no such argument"),
        ({"bddl_file_name": "mine.bddl"}, "none of hf-libero's 130 tasks"),
    ],
)
def test_what_it_does_not_have_is_said(arguments: dict, message: str) -> None:
    task = suite_tasks("libero_spatial")[0]
    with pytest.raises(EnvError, match=message):
        OffScreenRenderEnv(**{"bddl_file_name": str(task.bddl_file)} | arguments)
