"""A fast two-and-a-half-dimensional tabletop behind the ``VectorEnv`` interface.

It serves tests that something learns, and experiments with many seeds; it replaces no benchmark. There are three
families of tasks, with four colours each: "reach" (stop over the named block), "push" (push the named block into the
square) and "pick_place" (put the named block on the plate). Distractors are blocks of other colours: to settle on one
("reach"), to grasp one or to shift one ends the episode as a failure (terminated, reward 0). Success gives reward 1.

Actions are in units of the largest step: |dx|, |dy|, |dz| <= 1 (larger ones are clipped). Rotations are ignored, and
the gripper moves towards 0 = closed .. 1 = open (``end_effector``). ``world`` holds the physics, ``tasks`` the rules.
"""

import time
from collections.abc import Sequence

import numpy as np

from envs.base import EnvError, SimulatorEnv
from envs.base.vector_env import EnvInstance
from envs.tabletop.config import TabletopConfig
from envs.tabletop.drawing import Scene, draw
from envs.tabletop.tasks import (
    COLORS,
    FAMILIES,
    INIT_STATES,
    TARGET_COLORS,
    expert,
    judge,
    list_tasks,
    place,
    placement_rng,
    progress,
)
from envs.tabletop.world import World, advance
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec, EpisodeSpec, Observation, StepResult

_STATE, _STATE_OF_BLOCK = 8, 3  # numbers of ``TabletopVectorEnv.state``
PROPRIO_DIM = 5  # x, y, z of the finger tips in table widths, aperture 0..1, holding 0 or 1
MIN_IMAGE_SIZE = 32  # below this a block is less than three pixels wide
FRAME_SIZE = 192  # of recorded frames, which are drawn at this size, not enlarged


def env_spec(config: TabletopConfig) -> EnvSpec:
    """See ``envs.env_spec``. Raises EnvError if the configuration makes no sense."""
    if len(set(config.tasks)) != len(config.tasks):
        raise EnvError(f"env.tasks={list(config.tasks)} names a family twice: name each at most once")
    if config.image_size < MIN_IMAGE_SIZE:
        raise EnvError(
            f"env.image_size={config.image_size} is too small to see the blocks: use {MIN_IMAGE_SIZE} or more"
        )
    return EnvSpec(
        name="tabletop",
        views=("front",),
        image_size=config.image_size,
        proprio_dim=PROPRIO_DIM if config.proprio else 0,
        actions=end_effector(),
        max_episode_steps=config.max_episode_steps,
        instructions=tuple(task.instruction for task in list_tasks(config.tasks)),
        init_states=INIT_STATES,
        state_dim=_STATE + _STATE_OF_BLOCK * (1 + config.distractors),
    )


class TabletopVectorEnv(SimulatorEnv[EnvInstance]):
    """See the module. Placements are a pure function of (task, seed), or of (task, init_state) if one is given."""

    def __init__(self, config: TabletopConfig, num_envs: int) -> None:
        super().__init__(env_spec(config), num_envs)
        self._config = config
        self._tasks = list_tasks(config.tasks)
        self._world = World.empty(num_envs, 1 + config.distractors)
        self._colors = np.zeros((num_envs, 1 + config.distractors), np.int64)  # index into COLORS
        self._family = np.zeros(num_envs, np.int64)

    def _start(self, env_id: int, episode: EpisodeSpec, previous: EnvInstance | None) -> EnvInstance:
        task = self._tasks[episode.task]
        rng = placement_rng(task, episode.seed, episode.init_state)
        distractors = self._config.distractors
        others = rng.permutation([c for c in range(len(TARGET_COLORS)) if c != task.color]).tolist()
        others.append(len(TARGET_COLORS))
        tip, blocks, goal = place(task, 1 + distractors, rng)
        world = self._world
        world.tip[env_id], world.blocks[env_id], world.placed[env_id], world.goal[env_id] = tip, blocks, blocks, goal
        world.aperture[env_id] = 1.0 if FAMILIES[task.family] == "pick_place" else 0.0
        world.held[env_id] = -1
        world.settled[env_id] = 0
        self._colors[env_id] = [task.color, *others[:distractors]]
        self._family[env_id] = task.family
        return EnvInstance(episode)

    def _step(self, env_ids: Sequence[int], instances: list[EnvInstance], actions: np.ndarray) -> StepResult:
        """Sleeps ``latency_ms`` per executed control step of each environment: they share one core."""
        rows, before = np.asarray(env_ids, np.int64), np.array([instance.steps for instance in instances])
        recording = [i for i, instance in enumerate(instances) if instance.episode.record]
        n, chunk = actions.shape[:2]
        rewards, num_steps = np.zeros((n, chunk), np.float32), np.zeros(n, np.int32)
        success, failure, truncated = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        active = np.arange(n)
        for k in range(chunk):
            moving = rows[active]
            advance(self._world, moving, actions[active, k])
            num_steps[active] += 1
            for i in recording:
                if instances[i].running:
                    instances[i].frames.append(draw(self._scene(env_ids[i]), FRAME_SIZE))
            success[active], failure[active] = judge(self._world, self._family, moving)
            rewards[active, k] = success[active]
            ended = success[active] | failure[active]
            truncated[active] = ~ended & (before[active] + k + 1 >= self.spec.max_episode_steps)
            ended |= truncated[active]
            for i in active[ended].tolist():
                instances[i].running = False
            active = active[~ended]
            if not len(active):
                break
        if self._config.latency_ms > 0.0:
            time.sleep(self._config.latency_ms * 1e-3 * int(num_steps.sum()))
        return StepResult(rewards, num_steps, success | failure, truncated, success)

    def state(self, env_ids: Sequence[int]) -> np.ndarray:
        """Finger tips, aperture, whether the target or another block is held, goal. Then each block's place, and
        for how long the tips have been still over each."""
        world, rows = self._world, list(env_ids)
        held = world.held[rows]
        alone = world.aperture[rows], held == 0, held > 0
        blocks = world.blocks[rows].reshape(len(rows), -1), world.settled[rows]
        return np.column_stack([world.tip[rows], *alone, world.goal[rows], *blocks]).astype(np.float32)

    def _scene(self, env_id: int) -> Scene:
        world = self._world
        return Scene(
            tip=world.tip[env_id],
            aperture=float(world.aperture[env_id]),
            held=int(world.held[env_id]),
            blocks=world.blocks[env_id],
            colors=[COLORS[c] for c in self._colors[env_id]],
            goal=world.goal[env_id],
            family=int(self._family[env_id]),
        )

    def _sense(self, env_ids: Sequence[int], out: Observation) -> None:
        for env_id in env_ids:
            out.images[env_id, 0] = draw(self._scene(env_id), self.spec.image_size)
            if self.spec.proprio_dim:
                out.proprio[env_id] = self._proprio(env_id)

    def _proprio(self, env_id: int) -> np.ndarray:
        world = self._world
        return np.array([*world.tip[env_id], world.aperture[env_id], world.held[env_id] >= 0], np.float64)

    def expert_action(self, env_id: int) -> np.ndarray:
        return expert(self._world, int(self._family[env_id]), env_id)

    def potential(self, env_ids: Sequence[int]) -> np.ndarray:
        return progress(self._world, self._family, np.asarray(env_ids, np.int64))

    def demo_state(self, env_id: int) -> dict[str, np.ndarray]:
        """The present privileged state, by its path within a demonstration in LIBERO's layout.

        states: float64 [8 + 3 B]: finger tips 3, aperture, held block, goal 2, blocks 2 B, colors B, executed steps.
        robot_states: float64 [5], in full precision what obs/proprio (float32) shows to the policy: obs/ee_pos [3] and
        obs/gripper_states [2], the aperture and whether a block is held.
        """
        world, proprio = self._world, self._proprio(env_id)
        parts = (
            world.tip[env_id],
            [world.aperture[env_id], world.held[env_id]],
            world.goal[env_id],
            world.blocks[env_id].ravel(),
            self._colors[env_id],
            [self.instance(env_id).steps],
        )
        return {
            "states": np.concatenate([np.asarray(part, np.float64) for part in parts]),
            "robot_states": proprio,
            "obs/proprio": proprio.astype(np.float32),
            "obs/ee_pos": proprio[:3],
            "obs/gripper_states": proprio[3:],
        }


make_env = TabletopVectorEnv
