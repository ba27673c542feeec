"""The calls of one update, as the planner, the simulation and virtual learners count them.

    before      forward passes of the policy; off-policy, also the critic's steps
    minibatch   micro-batches and an optimizer step, again and again

Off-policy, a critic's step costs what a run has measured, or else its passes of the policy alone. Its own layers are
then taken to cost nothing, which is nearly so where the policy is large.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vla_rl.placement.profile import Profile
from vla_rl.placement.workload import Workload

_FORWARD = 1 / 3  # of a forward and a backward pass: the latter costs two of the former


@dataclass(frozen=True, slots=True)
class Call:
    """``times`` calls of one size.

    Attributes:
        activity: as the learner's meter names it.
        seconds: of one call.
        n: its size, chunks.
    """

    activity: str
    seconds: float
    n: float
    times: float


@dataclass(frozen=True, slots=True)
class UpdateCalls:
    """Of one rank; ``minibatch`` is repeated ``minibatches`` times."""

    before: tuple[Call, ...]
    minibatch: tuple[Call, ...]
    minibatches: float

    @property
    def seconds(self) -> float:
        """Of all of them."""
        once, again = (sum(call.seconds * call.times for call in calls) for calls in (self.before, self.minibatch))
        return once + again * self.minibatches

    def parts(self) -> Iterator[list[Call]]:
        """Whole calls, one after the other; ranks wait for each other after each list."""
        yield [call for call in self.before for _ in range(round(call.times))]
        for _ in range(round(self.minibatches)):
            yield [call for call in self.minibatch for _ in range(round(call.times))]


def update_calls(profile: Profile, workload: Workload, chunks: float, ranks: int) -> UpdateCalls:
    """Of an update of a super-batch with so many new chunks."""
    work = workload.update
    if work.step_rows:
        return _off_policy_calls(profile, workload, chunks)
    mine = workload.trained_per_chunk * chunks / work.minibatches / ranks
    passes = max(1, math.ceil(mine / workload.micro_batch))
    rows = mine / passes
    train = profile.train(rows)
    before = Call("forward", train * _FORWARD, rows, passes * work.minibatches * work.extra_passes)
    minibatch = Call("micro_batch", train, rows, passes), Call("step", profile.step, 1, 1)
    return UpdateCalls((before,), minibatch, work.epochs * work.minibatches)


def _off_policy_calls(profile: Profile, workload: Workload, chunks: float) -> UpdateCalls:
    work, rows = workload.update, workload.update.step_rows
    train = profile.train(rows)
    critic = profile.critic(rows) or train * _FORWARD * work.critic_passes
    before = (
        Call("critic_step", critic, rows, work.critic_rows * chunks / rows),
        Call("forward", train * _FORWARD, rows, work.extra_passes * chunks / rows),
    )
    parts = rows / work.pass_rows
    minibatch = (
        Call("micro_batch", profile.train(work.pass_rows), work.pass_rows, parts),
        Call("step", profile.step, 1, 1),
    )
    return UpdateCalls(before, minibatch, work.epochs * chunks / rows)
