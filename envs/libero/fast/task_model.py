"""One task's compiled MuJoCo model with LIBERO's own task code, shared by every environment that plays the task.

Building a model costs a fraction of a second and tens of megabytes, so each process builds it once per task. LIBERO
changes parts of the *model* while it runs: the places of fixtures, and whether the stove's burner glows. Each
``SimState`` keeps its own copy of these parts, and ``bind`` writes them back; everything else is in the environment's
own ``MjData``.

LIBERO rebuilds the model at every reset, although nothing random enters the model's XML: it places fixtures by writing
``body_pos`` and ``body_quat`` after compilation. Restoring those rows and drawing from LIBERO's own samplers in the
same order therefore gives the same state as a rebuild, bit for bit (tested).
"""

from __future__ import annotations

import pdb
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from envs.base import EnvError
from envs.libero.assets.resolve import LiberoAssets
from envs.libero.fast.stepping import SUBSTEPS, ArmState, RobotLayout, control_step, read_moment
from envs.libero.protocol.camera import moved
from envs.libero.protocol.conventions import arm_noise
from envs.libero.protocol.tasks import LiberoTask

if TYPE_CHECKING:
    from envs.libero.fast.osc_kernel import Moment

_MAX_PLACEMENT_ATTEMPTS = 100


@dataclass(slots=True)
class SimState:
    """What one environment owns while it plays a task: simulator state, controller state, rows of the model."""

    data: Any  # mujoco.MjData
    arm: ArmState
    fixture_pos: np.ndarray  # float64 [F, 3]
    fixture_quat: np.ndarray  # float64 [F, 4]
    seen: Moment = field(init=False)  # what cameras and proprioception show
    seen_at: int = SUBSTEPS  # the substep in which ``seen`` is read
    lit: np.ndarray = field(init=False)  # bool [L], lamps as LIBERO set them after the last control step ...
    seen_lit: np.ndarray = field(init=False)  # ... and as ``seen`` shows them: one step earlier


class TaskModel:
    """See the module. Not thread-safe: only one ``SimState`` is bound at a time.

    Raises EnvError if LIBERO cannot build the task.
    """

    def __init__(self, task: LiberoTask, assets: LiberoAssets) -> None:
        self.task = task
        self.env = _build_env(task, assets)
        self.model = self.env.sim.model._model
        self._perturb()
        self.robot = RobotLayout(self.env)
        names = self.env.fixtures_dict
        self._fixtures = np.array([self.env.obj_body_id[name] for name in names], dtype=int)
        self._lamps = _find_lamps(self.env)
        self._lamp_site = np.array([lamp.site for lamp in self._lamps], dtype=int)
        self._hidden_alpha = self.model.site_rgba[self._lamp_site, 3].copy()
        geoms = self.env.robots[0].gripper.important_geoms
        self._pads = [SimpleNamespace(contact_geoms=geoms[f"{side}_fingerpad"]) for side in ("left", "right")]
        self._movable = [name for name in self.env.obj_of_interest if name in self.env.objects_dict]
        self._owner: SimState | None = None
        self.scratch = mujoco.MjData(self.model)  # for poses other than the environments'; overwritten at every use

    def _perturb(self) -> None:
        """Another suite's camera, and where its arm starts, to which the controller also draws idle joints."""
        if self.task.camera is not None:
            camera = self.model.camera("agentview")
            camera.pos[:], camera.quat[:] = moved(camera.pos.copy(), camera.quat.copy(), self.task.camera)
        if self.task.arm is not None:
            robot = self.env.robots[0]
            robot.init_qpos = robot.controller.initial_joint = np.array(self.task.arm)

    def new_state(self) -> SimState:
        """The state of one environment, to be filled by ``place``."""
        data = mujoco.MjData(self.model)
        fixtures = len(self._fixtures)
        return SimState(data, ArmState(self.robot, data), np.zeros((fixtures, 3)), np.zeros((fixtures, 4)))

    def bind(self, state: SimState) -> None:
        """Make the model and LIBERO's task code refer to this state."""
        if self._owner is not state:
            self.env.sim.data._data = state.data
            self.model.body_pos[self._fixtures] = state.fixture_pos
            self.model.body_quat[self._fixtures] = state.fixture_quat
            self._owner = state

    def place(
        self,
        state: SimState,
        seed: int | None,
        init_state: np.ndarray | None,
        joint_noise: float = 0.0,
        joint_draws: int = 1,
    ) -> None:
        """Start an episode, up to (not including) the settling steps.

        LIBERO's samplers place fixtures and objects, drawing from numpy's global generator seeded with ``seed``; None:
        as it is. The samplers of joint positions draw ``joint_draws`` times (see ``dropin.OffScreenRenderEnv``). An
        initial state (float64 [1 + nq + nv]) then overwrites everything but the fixtures, as ``set_init_state`` does,
        and but the arm of a task that has a start of its own for it.
        Without one, normal noise of ``joint_noise`` rad is added to the arm's joints.

        Raises EnvError if the initial state has the wrong size or no valid placement is found.
        """
        if init_state is not None:
            self._check_size(init_state)
            if self.task.arm is not None:
                init_state = init_state.copy()
                init_state[1 + self.robot.arm_qpos] = self.task.arm
        self.bind(state)
        with _seeded(seed):
            for _ in range(_MAX_PLACEMENT_ATTEMPTS):
                if self._try_placement(state, joint_draws):
                    break
            else:
                raise EnvError(f"LIBERO finds no valid placement for {self.task} with seed {seed}: use another seed")
        state.fixture_pos[:] = self.model.body_pos[self._fixtures]
        state.fixture_quat[:] = self.model.body_quat[self._fixtures]
        state.arm.start(self.env.robots[0].controller)
        state.lit = np.zeros(len(self._lamps), dtype=bool)
        if init_state is None and joint_noise > 0 and seed is not None:
            init_state = np.concatenate([[state.data.time], state.data.qpos, state.data.qvel])
            init_state[1 + self.robot.arm_qpos] += arm_noise(seed, joint_noise)
        # LIBERO's observables run on a clock of their own, which each forced reading advances by one substep: one in
        # ``reset``, one more in ``set_init_state``. This decides in which substep of a control step they sample.
        state.seen_at = SUBSTEPS
        if init_state is not None:
            self.restore(state, init_state)
        else:
            self._look(state)

    def restore(self, state: SimState, init_state: np.ndarray) -> None:
        """Continue from an initial state, as ``set_init_state`` does. Raises EnvError if it has the wrong size."""
        self._check_size(init_state)
        self.bind(state)
        state.data.time = init_state[0]
        state.data.qpos[:] = init_state[1 : 1 + self.model.nq]
        state.data.qvel[:] = init_state[1 + self.model.nq :]
        state.lit = self.lamps(state)
        self._look(state)
        state.seen_at = state.seen_at - 1 or SUBSTEPS

    def _look(self, state: SimState) -> None:
        mujoco.mj_forward(self.model, state.data)
        state.seen, state.seen_lit = read_moment(state.arm), state.lit

    def _check_size(self, init_state: np.ndarray) -> None:
        expected = 1 + self.model.nq + self.model.nv
        if init_state.shape != (expected,):
            raise EnvError(
                f"an initial state of {self.task} has {init_state.size} numbers, the model of these assets {expected}: "
                "they do not belong together"
            )

    def _try_placement(self, state: SimState, joint_draws: int) -> bool:
        """LIBERO's ``_reset_internal`` without the robot's controller, whose first reading never differs."""
        from robosuite.utils.errors import RandomizationError

        env, model, data = self.env, self.model, state.data
        robot = env.robots[0]
        mujoco.mj_resetData(model, data)
        # LIBERO's samplers for drawers and shelves read site positions while all fixtures are still at the origin.
        model.body_pos[:], model.body_quat[:] = env.xml_pose
        np.random.randn(len(robot.init_qpos))  # robosuite's joint noise, of magnitude zero: keeps the stream in step
        data.qpos[robot._ref_joint_pos_indexes] = robot.init_qpos
        data.qpos[robot._ref_gripper_joint_pos_indexes] = robot.gripper.init_qpos
        for sampler in env.object_property_initializers * joint_draws:
            env.object_states_dict[sampler.name].set_joint(sampler.sample())
        mujoco.mj_kinematics(model, data)
        try:
            placed = env.placement_initializer.sample()
            placed = env.conditional_placement_initializer.sample(env.sim, placed)
            placed = env.conditional_placement_on_objects_initializer.sample(placed)
        except RandomizationError:
            return False
        for position, quaternion, thing in placed.values():
            if thing.name in env.fixtures_dict:
                body = env.obj_body_id[thing.name]
                model.body_pos[body], model.body_quat[body] = position, quaternion
            else:
                env.sim.data.set_joint_qpos(thing.joints[-1], np.concatenate([position, quaternion]))
        return True

    def step(self, state: SimState, action: np.ndarray) -> None:
        """One control step; ``action`` is float64 [7] in robosuite's convention."""
        self.bind(state)
        state.seen_lit = state.lit
        control_step(state.arm, action, state.seen, state.seen_at)
        if self._lamps:
            state.lit = self.lamps(state)

    def success(self, state: SimState) -> bool:
        """Whether the goal holds, as LIBERO's own predicates see it after a control step."""
        self.bind(state)
        return bool(self.env._check_success())

    def holds_object(self, state: SimState) -> bool:
        """Whether both finger pads touch the same movable object of the task's goal."""
        return any(self.holds(state, name) for name in self._movable)

    def holds(self, state: SimState, name: str) -> bool:
        """Whether both finger pads touch this object."""
        self.bind(state)
        return all(self.env.check_contact(pad, self.env.objects_dict[name]) for pad in self._pads)

    def lamps(self, state: SimState) -> np.ndarray:
        """bool [L]: which visual indicators (the stove's burner) LIBERO would switch on in this state."""
        return np.array([state.data.qpos[lamp.qpos] >= lamp.threshold for lamp in self._lamps], dtype=bool)

    def show_lamps(self, lit: np.ndarray) -> None:
        """Write the indicators' visibility into the model, for rendering."""
        self.model.site_rgba[self._lamp_site, 3] = np.where(lit, 1 - self._hidden_alpha, self._hidden_alpha)


@dataclass(frozen=True, slots=True)
class _Lamp:
    site: int
    qpos: int
    threshold: float


def _find_lamps(env: Any) -> tuple[_Lamp, ...]:
    found = []
    for state in env.tracking_object_states_change:
        thing = env.get_object(state.object_name)
        threshold = min(thing.object_properties["articulation"]["default_turnon_ranges"])
        for site, _ in thing.object_properties["vis_site_names"].values():
            site_id = env.sim.model.site_name2id(site)
            found += [_Lamp(site_id, int(env.sim.model.get_joint_qpos_addr(j)), threshold) for j in thing.joints]
    return tuple(found)


class _Reusable:
    """Mixed into LIBERO's task classes: keeps the compiled poses, and checks contacts by id instead of by name."""

    def _assert_problem_name(self) -> None:
        """LIBERO-Plus names a class for each scene in its BDDL files: it is one of LIBERO's, with that scene."""
        self.parsed_problem["problem_name"] = type(self).__name__.lower()  # type: ignore[attr-defined]

    def _reset_internal(self) -> None:
        model = self.sim.model._model  # type: ignore[attr-defined]
        self.xml_pose = model.body_pos.copy(), model.body_quat.copy()
        self._geoms_of: dict[int, np.ndarray] = {}
        super()._reset_internal()  # type: ignore[misc]

    def check_contact(self, geoms_1: Any, geoms_2: Any) -> bool:
        """robosuite's check between two object models, over all contacts at once."""
        pairs = self.sim.data._data.contact.geom  # type: ignore[attr-defined]
        first, second = self._mask(geoms_1), self._mask(geoms_2)
        one, two = pairs[:, 0], pairs[:, 1]
        return bool(((first[one] & second[two]) | (first[two] & second[one])).any())

    def _mask(self, thing: Any) -> np.ndarray:
        """bool [ngeom]: the geoms of an object model that take part in contacts."""
        mask = self._geoms_of.get(id(thing))
        if mask is None:
            model = self.sim.model  # type: ignore[attr-defined]
            mask = np.zeros(model.ngeom, dtype=bool)
            mask[[model.geom_name2id(name) for name in thing.contact_geoms]] = True
            self._geoms_of[id(thing)] = mask
        return mask


def _build_env(task: LiberoTask, assets: LiberoAssets) -> Any:
    """LIBERO's environment object as ``OffScreenRenderEnv`` configures it, without its renderer and observables."""
    import libero.libero as package
    import robosuite
    from libero.libero.envs import TASK_MAPPING
    from libero.libero.envs.bddl_utils import get_problem_info
    from robosuite.utils.errors import RandomizationError

    vars(package)["_assets_path_cache"] = str(assets.path)
    name = get_problem_info(str(task.bddl_file))["problem_name"]
    problem = next(problem for known, problem in TASK_MAPPING.items() if name.startswith(known))
    scene, floor, wall = task.scene or (None, None, None)
    styles = {"floor_style": floor, "wall_style": wall} if task.scene else None
    reusable = type(problem.__name__, (_Reusable, problem), {})
    with _seeded(0):
        for _ in range(_MAX_PLACEMENT_ATTEMPTS):
            try:
                env: Any = reusable(
                    str(task.bddl_file),
                    robots=["Panda"],
                    controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
                    initialization_noise=None,
                    use_camera_obs=False,
                    has_offscreen_renderer=False,
                    control_freq=20,
                    scene_xml=scene or None,
                    scene_properties=styles,
                )
                break
            except RandomizationError:
                continue
        else:
            raise EnvError(f"LIBERO finds no valid placement for {task}: do its assets belong to this hf-libero?")
    env.visualize(vis_settings=dict.fromkeys(env._visualizations, False))
    return env


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed numpy's global generator, which LIBERO's samplers draw from, and restore it afterwards; None: neither.

    If LIBERO's drawer sampler finds no place, it opens a debugger, which would wait on stdin; here it raises instead.
    """
    state = np.random.get_state()
    debugger = pdb.set_trace
    if seed is not None:
        np.random.seed(seed % 2**32)
    pdb.set_trace = _refuse_debugger
    try:
        yield
    finally:
        pdb.set_trace = debugger
        if seed is not None:
            np.random.set_state(state)


def _refuse_debugger(*_: Any, **__: Any) -> None:
    from robosuite.utils.errors import RandomizationError

    raise RandomizationError("no place inside the region")
