"""Groups of finished episodes: collects members, and filters out groups that carry no learning signal."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from vla_rl.core.records import GroupRules, Trajectory

TrajectoryGroup = list[Trajectory]

_SAME_RETURN = 1e-6  # sums of equal float32 rewards may differ by rounding


class Groups:
    """Finished episodes in groups of ``rules.size``. Members arrive in any order and from different policy versions."""

    def __init__(self, rules: GroupRules) -> None:
        self.rules = rules
        self._filtered_in_a_row = 0
        self._partial: dict[int, TrajectoryGroup] = {}
        self._whole: list[TrajectoryGroup] = []

    def add(self, trajectory: Trajectory) -> int:
        """Take in an episode. Returns how many episodes were filtered out with it: 0, or a whole group."""
        group = self._partial.setdefault(trajectory.episode.group, [])
        group.append(trajectory)
        if len(group) < self.rules.size:
            return 0
        del self._partial[trajectory.episode.group]
        if self._teaches(group):
            self._filtered_in_a_row = 0
        elif self._filtered_in_a_row < self.rules.max_filtered:
            self._filtered_in_a_row += 1
            return len(group)
        self._whole.append(sorted(group, key=lambda t: t.episode.member))
        return 0

    def _teaches(self, group: TrajectoryGroup) -> bool:
        """Whether returns differ, which gives advantages, and the success rate is within the bounds."""
        returns = [t.total_reward for t in group]
        success = float(np.mean([t.success for t in group]))
        differ = len(group) == 1 or max(returns) - min(returns) > _SAME_RETURN
        return differ and self.rules.success_low <= success <= self.rules.success_high

    def give_up(self, group: int) -> int:
        """Drop a group that will not be complete. Returns how many of its episodes were here."""
        return len(self._partial.pop(group, ()))

    def drop_older_than(self, version: int) -> int:
        """Drop groups with any chunk from an older policy version. Returns the number of dropped episodes."""
        before = len(self)
        self._whole = [group for group in self._whole if min(t.oldest_policy_version for t in group) >= version]
        return before - len(self)

    @property
    def ready(self) -> int:
        """Episodes of complete groups."""
        return len(self._whole) * self.rules.size

    def first(self, episodes: int) -> list[Trajectory]:
        """The first complete groups, ``episodes`` in all."""
        return [trajectory for group in self._whole[: episodes // self.rules.size] for trajectory in group]

    def take(self, episodes: int) -> list[Trajectory]:
        """Likewise; they are here no longer."""
        taken = self.first(episodes)
        self._whole = self._whole[episodes // self.rules.size :]
        return taken

    def __len__(self) -> int:
        """Number of episodes, including those of incomplete groups."""
        return sum(map(len, self._whole)) + sum(map(len, self._partial.values()))

    def __iter__(self) -> Iterator[Trajectory]:
        groups: Iterable[TrajectoryGroup] = (*self._whole, *self._partial.values())
        return (trajectory for group in groups for trajectory in group)


def young_enough(batches: Iterable[Sequence[Trajectory]], version: int) -> list[Trajectory]:
    """All episodes of whole groups without a chunk from an older policy version."""
    found = [trajectory for batch in batches for trajectory in batch]
    stale = {t.episode.group for t in found if t.oldest_policy_version < version}
    return [t for t in found if t.episode.group not in stale]
