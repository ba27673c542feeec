"""ManiSkill's tasks as this project offers them. This module does not need ManiSkill itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from envs.base.packages import versions
from envs.maniskill.config import ManiSkillConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec

ACTIONS = end_effector()
PROPRIO_DIM = 8
INIT_STATES = 50  # ManiSkill's own resets with the seeds 0..49
_ASSETS = {"widowx250s": "the WidowX robot", "bridge_v2_real2sim": "the Bridge scenes"}  # by ManiSkill's names


@dataclass(frozen=True, slots=True)
class Task:
    """One of ManiSkill's tasks."""

    uid: str
    instruction: str
    steps: int  # ManiSkill's time limit, in control steps
    camera: str = "base_camera"
    control: str | None = "pd_ee_delta_pose"  # None: the robot's only controller
    textures: str = "rgb"  # ManiSkill's observation mode: what the camera renders
    square: bool = True  # the camera takes any size; else its images are resized
    upright: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 0.0)  # w, x, y, z; proprioception turns from here
    things: Mapping[str, str] = field(default_factory=dict)  # what the expert looks at: ManiSkill's actors
    milestones: tuple[str, ...] = ()  # on the way to success: keys of what ManiSkill's ``evaluate`` reports
    assets: tuple[str, ...] = ()  # to be downloaded with ManiSkill's tool

    def __str__(self) -> str:
        return self.uid


def _bridge(uid: str, instruction: str, steps: int = 60) -> Task:
    """A scene of the Bridge data set with its greenscreen (SIMPLER, arXiv:2405.05941), and a WidowX robot."""
    return Task(
        uid=uid,
        instruction=instruction,
        steps=steps,
        camera="3rd_view_camera",
        control=None,
        textures="rgb+segmentation",
        square=False,
        upright=(1.0, 0.0, 0.0, 0.0),
        milestones=("is_src_obj_grasped", "consecutive_grasp"),  # held once, and held for 5 control steps in a row
        assets=tuple(_ASSETS),
    )


TASKS = {
    task.uid: task
    for task in (
        Task(
            "PushCube-v1",
            "push the blue cube to the red and white target",
            50,
            things={"cube": "obj", "goal": "goal_region"},
        ),
        Task(
            "PickCube-v1",
            "pick up the red cube and hold it at the green sphere",
            50,
            things={"cube": "cube", "goal": "goal_site"},
        ),
        Task("StackCube-v1", "stack the red cube on the green cube", 50, things={"cube": "cubeA", "goal": "cubeB"}),
        _bridge("PutCarrotOnPlateInScene-v1", "put carrot on plate"),
        _bridge("PutSpoonOnTableClothInScene-v1", "put the spoon on the towel"),
        _bridge("StackGreenCubeOnYellowCubeBakedTexInScene-v1", "stack the green block on the yellow block"),
        _bridge("PutEggplantInBasketScene-v1", "put eggplant into yellow basket", 120),
    )
}


def select_tasks(config: ManiSkillConfig) -> tuple[Task, ...]:
    """The configured tasks; the task of an ``EpisodeSpec`` indexes them."""
    return tuple(TASKS[uid] for uid in config.tasks)


def maniskill_spec(config: ManiSkillConfig) -> EnvSpec:
    """The spec of ``ManiSkillVectorEnv(config, ...)``."""
    tasks = select_tasks(config)
    return EnvSpec(
        name="maniskill",
        views=("third_person",),
        image_size=config.image_size,
        proprio_dim=PROPRIO_DIM if config.proprio else 0,
        actions=ACTIONS,
        max_episode_steps=config.max_episode_steps or max(task.steps for task in tasks),
        instructions=tuple(task.instruction for task in tasks),
        init_states=INIT_STATES,
        engine=versions("mani_skill", "sapien"),
        assets="downloaded" if any(task.assets for task in tasks) else "package",
        robot="widowx" if tasks[0].milestones else "panda",
    )
