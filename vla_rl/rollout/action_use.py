"""How much of their limits the executed actions use."""

import numpy as np

from vla_rl.core.actions import ActionSpace
from vla_rl.observability.meter import Meter

_NEAR = 0.01  # of a number's range


class ActionUse:
    """Counts executed numbers that lie at their limits and in the middle between them, all but those of grippers.

    Grippers are left out because they are open or closed.
    """

    def __init__(self, space: ActionSpace, meter: Meter) -> None:
        self._dims = [i for i, dim in enumerate(space.dims) if dim.gripper is None]
        self._low, self._range = space.low[self._dims], (space.high - space.low)[self._dims]
        self._meter = meter

    def count(self, actions: np.ndarray, num_steps: np.ndarray) -> None:
        """``actions`` [n, K, A], of which the first ``num_steps`` [n] were executed."""
        executed = np.arange(actions.shape[1]) < num_steps[:, None]
        place = (actions[executed][:, self._dims] - self._low) / self._range  # 0 .. 1 within the limits
        from_middle = np.abs(place - 0.5)
        self._meter.count("action_numbers", place.size)
        self._meter.count("numbers_at_limits", int((from_middle >= 0.5 - _NEAR).sum()))
        self._meter.count("numbers_in_middle", int((from_middle <= _NEAR).sum()))
