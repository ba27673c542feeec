"""What the numbers of an action mean. An environment declares it, and nothing else in the project knows of grippers."""

from vla_rl.core.actions.space import OPENVLA, ROBOSUITE, ActionDim, ActionSpace, Gripper, assumed, end_effector

__all__ = ["OPENVLA", "ROBOSUITE", "ActionDim", "ActionSpace", "Gripper", "assumed", "end_effector"]
