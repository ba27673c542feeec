"""How much of their limits actions use, from the counts of env workers to the metrics."""

import numpy as np
import pytest

from envs import make_env
from envs.tabletop.config import TabletopConfig
from vla_rl.core.actions import OPENVLA, ActionDim, ActionSpace
from vla_rl.core.records import EpisodeSpec
from vla_rl.observability.meter import Meter
from vla_rl.observability.usage import Throughput
from vla_rl.rollout.action_use import ActionUse

GRIPPER = ActionDim("grip", 0.0, 1.0, gripper=OPENVLA)
SPACE = ActionSpace((ActionDim("dx", -0.5, 0.5), ActionDim("turn", 0.0, 10.0), GRIPPER))


def test_numbers_at_limits_and_in_the_middle_are_those_that_were_executed() -> None:
    meter = Meter()
    actions = np.array(
        [
            [[0.495, 5.05, 1.0], [-3.0, 9.8, 1.0], [0.0, 5.0, 0.0]],  # beyond a limit counts; the last is not executed
            [[0.0, 0.05, 0.0], [0.2, 7.0, 0.0], [0.2, 7.0, 0.5]],
        ],
        np.float32,
    )
    ActionUse(SPACE, meter).count(actions, np.array([2, 3]))
    found = Throughput().measure({"worker": {0: meter.snapshot()}})
    assert found["rollout/action_saturation"] == pytest.approx(3 / 8), "0.495, -3 and 0.05"
    assert found["rollout/action_middle"] == pytest.approx(2 / 10), "5.05 and 0"


@pytest.mark.parametrize("task", ["reach", "push", "pick_place"])
def test_an_expert_is_far_from_what_is_called_a_fault(task: str) -> None:
    meter = Meter()
    env = make_env(TabletopConfig(tasks=(task,)), 1)
    use = ActionUse(env.spec.actions, meter)
    for episode in range(8):
        env.reset([0], [EpisodeSpec(episode, 0, episode)])
        ended = False
        while not ended:
            action = env.expert_action(0)[None, None]
            result = env.step([0], action)
            use.count(action, result.num_steps)
            ended = bool(result.terminated[0] or result.truncated[0])
    found = Throughput().measure({"worker": {0: meter.snapshot()}})
    assert 0.2 < found["rollout/action_saturation"] < 0.6
    assert 0.5 < found["rollout/action_middle"] < 0.8


def test_without_a_number_there_is_no_share() -> None:
    meter = Meter()
    ActionUse(ActionSpace((GRIPPER,)), meter).count(np.ones((2, 3, 1)), np.array([3, 3]))
    assert not [name for name in Throughput().measure({"worker": {0: meter.snapshot()}}) if "action" in name]
