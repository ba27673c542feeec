"""Averaged weights (``learner.ema``): a mean of the weights after each update, the newer ones weighing more.

    a_t = sum_i d^(t-i) w_i / sum_i d^(t-i)        over the updates i = 1 .. t

The weights that training began with have no share: it is the moving average a + (1 - d) (w - a) from 0, corrected for
its start as Adam's moments are (arXiv:1412.6980, section 3). It is computed without the division:

    a_t = a_(t-1) + s_t (w_t - a_(t-1))            s_t = (1 - d) / (1 - d^t), and a_1 = w_1
"""

import torch

from vla_rl.learner.whole_state import AVERAGE, UPDATES, WholeState


def newest_share(decay: float, updates: int) -> float:
    """The share of the newest weights in a mean over so many updates."""
    return (1.0 - decay) / (1.0 - decay**updates)


@torch.no_grad()
def take_in(state: WholeState, decay: float) -> None:
    """Take the weights as they are now into their average. Call it after each update, on all ranks.

    The average is divided among the ranks like the optimizer's moments, next to which it lies.
    """
    for weights, kept in state.averaged():
        kept[UPDATES] += 1
        kept[AVERAGE].lerp_(weights, newest_share(decay, kept[UPDATES]))
