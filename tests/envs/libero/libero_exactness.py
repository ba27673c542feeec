"""LiberoVectorEnv against the reference environment of hf-libero, bit for bit."""

import itertools
from functools import partial

import numpy as np

from envs.base import empty_observation
from envs.libero.config import LiberoConfig
from envs.libero.env import LiberoVectorEnv
from envs.libero.protocol.conventions import NO_OP, to_robosuite
from envs.libero.protocol.tasks import load_init_states, suite_tasks
from envs.libero.reference_env import ReferenceEnv
from vla_rl.core.records import EpisodeSpec

SIZE = 48


def make(suite="libero_spatial", tasks=(0,), num_envs=1, **keys):
    return LiberoVectorEnv(LiberoConfig(suite=suite, tasks=tasks, image_size=SIZE, **keys), num_envs)


def random_actions(seed, steps, lean=-0.3):
    """Convention actions that reach the table, with some zero rotations (robosuite treats these apart)."""
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (steps, 7)).astype(np.float32)
    actions[:, 2] += np.float32(lean)
    actions[::3, 3:6] = 0
    actions[:, 6] = rng.integers(0, 2, steps)
    return actions


class RenderedOnDemand(ReferenceEnv):
    """Renders only where asked to: it would at every step, wanted or not, at many times the cost of all else."""

    def __init__(self, task, seed, init_state, joint_noise=0.0):
        super().__init__(task, ("agentview", "robot0_eye_in_hand"), SIZE)
        state = None if init_state is None else load_init_states(task)[init_state]
        self.reset(seed, state, joint_noise, settle_steps=9)
        self.play(NO_OP, render=True)

    def step(self, action):
        return self.play(action, render=False)

    def play(self, action, render):
        sim = self.env.env.sim
        sim.render = partial(type(sim).render, sim) if render else lambda **_: np.zeros((SIZE, SIZE, 3), np.uint8)
        return super().step(action)

    @property
    def state(self):
        return self.env.get_sim_state()


def assert_same_view(env, reference):
    view = empty_observation(env.spec, env.num_envs)
    env.observe([0], view)
    for image, name in zip(view.images[0], env.spec.views, strict=True):
        assert np.array_equal(image, reference.image(name))
    assert np.array_equal(view.proprio[0], reference.proprioception().astype(np.float32))


def assert_exact(suite, number, init_state, actions, views_at, seed=11, joint_noise=0.0):
    """The same trajectory in both environments, while a second environment of the same model runs something else."""
    task = suite_tasks(suite)[number]
    env = make(suite, (number,), num_envs=2, wrist_camera=True, joint_noise=joint_noise)
    reference = RenderedOnDemand(task, seed, init_state, joint_noise)
    try:
        env.reset([1], [EpisodeSpec(id=1, task=0, seed=seed + 1)])
        env.reset([0], [EpisodeSpec(id=0, task=0, seed=seed, init_state=init_state)])
        assert np.array_equal(env.demo_state(0)["states"], reference.state)
        assert_same_view(env, reference)
        for step in itertools.count():
            action = actions(env, step)
            if action is None:
                return None
            result = env.step([0], action[None, None])
            done = reference.play(to_robosuite(action), render=step in views_at)
            if step % 8 == 0:
                env.step([1], action[None, None])
            assert np.array_equal(env.demo_state(0)["states"], reference.state), f"differs after step {step}"
            assert bool(result.success[0]) == bool(done)
            if step in views_at:
                assert_same_view(env, reference)
            if done or result.truncated[0]:
                return bool(done)
    finally:
        reference.close()
        env.close()


def from_list(actions):
    return lambda env, step: actions[step] if step < len(actions) else None


def noisy_expert(seed):
    """The scripted expert, disturbed."""
    rng = np.random.default_rng(seed)

    def act(env, step):
        action = env.expert_action(0)
        action[:6] += 0.2 * rng.normal(size=6).astype(np.float32)
        return action

    return act
