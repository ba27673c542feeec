"""Groups of finished episodes: complete ones leave, those that teach nothing are told apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from vla_rl.core.records import GroupRules, Trajectory

TrajectoryGroup = list[Trajectory]


class Groups:
    """Finished episodes, in whole groups of ``rules.size``. Members come in any order and from different versions."""

    def __init__(self, rules: GroupRules) -> None:
        self.rules = rules
        self._filtered_in_a_row = 0
        self._partial: dict[int, TrajectoryGroup] = {}
        self._whole: list[TrajectoryGroup] = []

    def add(self, trajectory: Trajectory) -> int:
        """Take in an episode; returns how many are filtered out thereby (none, or a whole group)."""
        group = self._partial.setdefault(trajectory.episode.group, [])
        group.append(trajectory)
        if len(group) < self.rules.size:
            return 0
        del self._partial[trajectory.episode.group]
        success = float(np.mean([t.success for t in group]))
        if self.rules.success_low <= success <= self.rules.success_high:
            self._filtered_in_a_row = 0
        elif self._filtered_in_a_row < self.rules.max_filtered:
            self._filtered_in_a_row += 1
            return len(group)
        self._whole.append(sorted(group, key=lambda t: t.episode.member))
        return 0

    def drop_older_than(self, version: int) -> int:
        """Drop whole groups in which an older version had a part; returns how many episodes that were."""
        before = len(self)
        self._whole = [group for group in self._whole if min(t.oldest_version for t in group) >= version]
        return before - len(self)

    def ready(self, episodes: int) -> bool:
        """Whether that many episodes stand in whole groups."""
        return len(self._whole) * self.rules.size >= episodes

    def take(self, episodes: int) -> list[Trajectory]:
        """The first complete groups, ``episodes`` in all."""
        count = episodes // self.rules.size
        taken, self._whole = self._whole[:count], self._whole[count:]
        return [trajectory for group in taken for trajectory in group]

    def __len__(self) -> int:
        """Episodes, those of incomplete groups included."""
        return sum(map(len, self._whole)) + sum(map(len, self._partial.values()))

    def __iter__(self) -> Iterator[Trajectory]:
        groups: Iterable[TrajectoryGroup] = (*self._whole, *self._partial.values())
        return (trajectory for group in groups for trajectory in group)
