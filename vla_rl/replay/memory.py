"""The replay memory of off-policy learning: episodes that are kept beyond their first use.

    finished episodes ──add──▶ [ the newest, up to a number of bytes ] ──sample──▶ transitions of chunks

Every frame is stored once, as uint8. A transition is one chunk: the observation in which it was chosen, its actions and
rewards, and the observation after its executed steps; or those of the next chunks, too, and the observation after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from envs.base.demonstration_records import Demonstrations
from vla_rl.core.kept_episodes import KeptEpisodes
from vla_rl.core.records import STATE, STATE_AFTER, Array, Record, SuperBatch, join_records, take_rows


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of n transitions."""

    images: Array  # uint8 [n, V, H, W, 3], or float32 [n, E], what frozen parts of the policy make of them
    proprio: Array  # float32 [n, P]
    elapsed: Array  # float32 [n]
    state: Array  # float32 [n, S]; S is 0 unless the critic reads the simulator's state


@dataclass(frozen=True, slots=True)
class Transitions:
    """n chunks, drawn with replacement. Rewards are those of C chunks, of which it is the first."""

    before: Seen
    after: Seen  # without meaning where ``continues`` is false
    task: Array  # int32 [n]
    actions: Array  # float32 [n, K, A], normalized
    rewards: Array  # float32 [n, C, K]
    steps: Array  # int32 [n, C], executed; 0 after the episode's end
    continues: Array  # bool [n], whether ``after`` has a value
    success: Array  # bool [n], of the episode
    record: Record  # of the decisions, [n, ...] each

    @property
    def num_steps(self) -> Array:
        """int32 [n], executed of the chunks themselves."""
        return self.steps[:, 0]


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """One episode of n chunks. It has n + 1 observations if the last chunk's next one has a value, else n."""

    images: Array  # [n or n + 1, ...], see ``Seen``
    proprio: Array  # float32 [n or n + 1, P]
    elapsed: Array  # float32 [n or n + 1]
    state: Array  # float32 [n or n + 1, S]
    actions: Array  # float32 [n, K, A], normalized
    rewards: Array  # float32 [n, K]
    num_steps: Array  # int32 [n]
    task: int
    success: bool
    record: Record = field(default_factory=dict)  # of the decisions, [n, ...] each

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def nbytes(self) -> int:
        """That a memory takes for it: all but images are held a second time, in a row with other episodes'."""
        return self.images.nbytes + 2 * sum(
            x.nbytes for x in (*(getattr(self, n) for n in _SMALL), *self.record.values())
        )


_OBSERVED = "images", "proprio", "elapsed", "state"
_SMALL = *_OBSERVED[1:], "actions", "rewards", "num_steps"  # images stay where they are
_RECORD = "record."  # before the names of a record, among other columns


def episodes_of(batch: SuperBatch, actions: Array, valued: Array, record: Mapping[str, Array]) -> list[StoredEpisode]:
    """The new real episodes of a super-batch.

    ``actions`` [M, K, A]: normalized ones of all chunks. ``valued`` bool [B]: whether the observation at an episode's
    end has a value (time limits that are no part of the task); it must have been recorded. ``record``: what is kept of
    the batch's own.
    """
    found = []
    for b in range(batch.new_episodes):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        seen, state = batch.obs_row[rows], _states(batch, rows)
        if valued[b] and batch.final_obs_row[b] >= 0:
            seen = np.append(seen, batch.final_obs_row[b])
        else:
            state = state[:-1]
        found.append(
            StoredEpisode(
                images=batch.images[seen],
                proprio=batch.proprio[seen],
                elapsed=batch.elapsed[seen],
                state=state,
                actions=actions[rows].copy(),
                rewards=batch.rewards[rows].copy(),
                num_steps=batch.num_steps[rows].copy(),
                task=int(batch.task[batch.offsets[b]]),
                success=bool(batch.success[b]),
                record={name: array[rows].copy() for name, array in record.items()},
            )
        )
    return found


def _states(batch: SuperBatch, rows: slice) -> Array:
    """float32 [n + 1, S] of an episode of n chunks."""
    if STATE not in batch.record:
        return np.zeros((rows.stop - rows.start + 1, 0), np.float32)
    return np.concatenate([batch.record[STATE][rows], batch.record[STATE_AFTER][rows][-1:]])


def episodes_of_demonstrations(
    demos: Demonstrations, actions: Array, mask: Array, horizon: int, record: Mapping[str, Array]
) -> list[StoredEpisode]:
    """Demonstrations as episodes that end with a reward of 1: one for each row at which their first chunk can begin.

    So every row is the beginning of one chunk, and every frame is held once (mapped from its file).

    Args:
        actions, mask: of ``Demonstrations.chunks``, the actions normalized.
        horizon: control steps of an episode, for the elapsed time.
        record: of the actions (``Policy.encode``).
    """
    size, found = actions.shape[1], []
    for start, end in pairwise(demos.offsets.tolist()):
        for first in range(start, min(start + size, end)):
            rows = slice(first, end, size)
            num_steps = mask[rows].sum(axis=1).astype(np.int32)
            rewards = np.zeros((len(num_steps), size), np.float32)
            rewards[-1, num_steps[-1] - 1] = 1.0
            found.append(
                StoredEpisode(
                    images=demos.images[rows],
                    proprio=demos.proprio[rows],
                    elapsed=((np.arange(first, end, size) - start) / horizon).astype(np.float32),
                    state=np.zeros((len(num_steps), 0), np.float32) if demos.state is None else demos.state[rows],
                    actions=actions[rows],
                    rewards=rewards,
                    num_steps=num_steps,
                    task=int(demos.task[start]),
                    success=True,
                    record=take_rows(record, rows),
                )
            )
    return found


@dataclass(frozen=True, slots=True)
class DrawingRule:
    """Which chunks are drawn how often.

    Attributes:
        successes: share of chunks of successful episodes, if the memory has both kinds; None: as many as it has.
        tasks_evenly: whether each task has the same share, of successes and of others.
        half_life: an episode counts half as much when so many newer ones are there; None: age does not count.
    """

    successes: float | None = None
    tasks_evenly: bool = False
    half_life: float | None = None


class ReplayMemory:
    """The newest episodes, up to ``max_bytes``; the last one is kept, however large it is."""

    def __init__(self, max_bytes: float, return_chunks: int = 1) -> None:
        """``return_chunks``: C of the transitions."""
        self._return_chunks = return_chunks
        self._kept = KeptEpisodes(StoredEpisode, max_bytes, lambda episode: episode.nbytes)
        self._index()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def episodes(self) -> tuple[StoredEpisode, ...]:
        """All that is kept, the oldest first."""
        return self._kept.episodes

    def add(self, episodes: Sequence[StoredEpisode]) -> None:
        """Keep these, and forget the oldest ones that have no room."""
        self._kept.add(episodes)
        self._index()

    def _index(self) -> None:
        kept = self.episodes
        self._chunks, self._observed = self._kept.lengths("actions"), self._kept.lengths("images")
        self._task = np.array([episode.task for episode in kept], np.int32)
        self._succeeded = np.array([episode.success for episode in kept], bool)
        # what is small, of all episodes one after the other
        self._flat = {name: self._kept.column(name) for name in _SMALL if kept}
        recorded = kept[0].record if kept else ()
        self._flat |= {_RECORD + name: np.concatenate([e.record[name] for e in kept]) for name in recorded}

    def sample(self, count: int, rule: DrawingRule, rng: np.random.Generator) -> Transitions:
        """Chunks at random, with replacement; raises ValueError if there are none."""
        if not len(self):
            raise ValueError("the replay memory is empty: add episodes first")
        episode = rng.choice(len(self), size=count, p=self._shares(rule))
        return self._gathered(episode, rng.integers(self._chunks[episode]))

    def _shares(self, rule: DrawingRule) -> Array:
        """float64 [episodes]: their parts of what is drawn. Those of one kind and task are drawn by size and age."""
        age = np.arange(len(self))[::-1]
        weights = np.log(self._chunks) - (0.0 if rule.half_life is None else np.log(2.0) * age / rule.half_life)
        kinds = np.zeros(len(self), bool) if rule.successes is None else self._succeeded
        shares, of_kind = np.zeros(len(self)), {True: rule.successes or 0.0, False: 1.0 - (rule.successes or 0.0)}
        for kind in (found := set(kinds.tolist())):
            tasks = set(self._task[kinds == kind].tolist()) if rule.tasks_evenly else {None}
            for task in tasks:
                group = (kinds == kind) & (True if task is None else self._task == task)
                part = np.exp(weights[group] - weights[group].max())  # none of them is lost, however old
                share = (of_kind[kind] if len(found) > 1 else 1.0) / len(tasks)
                shares[group] = share * part / part.sum()
        return shares / shares.sum()

    def _gathered(self, episode: Array, row: Array) -> Transitions:
        """Chunk ``row[i]`` of episode ``episode[i]``."""
        # what follows the last chunk may have no value: any row stands for it then
        after = np.minimum(row + self._return_chunks, self._chunks[episode])
        continues = after < self._observed[episode]
        chunk = _first(self._chunks)[episode] + row
        following = np.arange(self._return_chunks)
        played = row[:, None] + following < self._chunks[episode][:, None]
        earning = np.where(played, chunk[:, None] + following, 0)
        recorded = [name for name in self._flat if name.startswith(_RECORD)]
        return Transitions(
            before=self._seen(episode, row),
            after=self._seen(episode, np.where(continues, after, row)),
            task=self._task[episode],
            continues=continues,
            success=self._succeeded[episode],
            record={name.removeprefix(_RECORD): self._flat[name][chunk] for name in recorded},
            actions=self._flat["actions"][chunk],
            rewards=self._flat["rewards"][earning],
            steps=self._flat["num_steps"][earning] * played,
        )

    def _seen(self, episode: Array, row: Array) -> Seen:
        images = np.stack([self.episodes[e].images[r] for e, r in zip(episode.tolist(), row.tolist(), strict=True)])
        at = _first(self._observed)[episode] + row
        return Seen(images, *(self._flat[name][at] for name in _OBSERVED[1:]))

    def states(self) -> Array:
        """float32 [n, S]: those of all observations."""
        return self._flat["state"]

    def metrics(self) -> dict[str, float]:
        """Figures of what is kept."""
        return {
            "memory_episodes": float(len(self)),
            "memory_chunks": float(self._chunks.sum()),
            "memory_success": float(self._succeeded.mean()) if len(self) else 0.0,
            "memory_forgotten": float(self._kept.forgotten),
            "memory_gib": self._kept.taken / 2**30,
        }

    def save(self, path: Path) -> None:
        """Write all episodes to an .npz file, now or later (``postponed``); ``load`` reads it."""
        self._kept.save(path)

    def load(self, path: Path) -> None:
        """Continue from ``save``. Raises UserError if the file is missing or damaged."""
        self._kept.load(path)
        self._index()


def joined(parts: Sequence[Transitions]) -> Transitions:
    """All of them, one after the other."""

    def column(name: str) -> Array:
        return np.concatenate([getattr(part, name) for part in parts])

    def seen(when: str) -> Seen:
        return Seen(*(np.concatenate([getattr(getattr(part, when), name) for part in parts]) for name in _OBSERVED))

    names = "task", "actions", "rewards", "steps", "continues", "success"
    columns: dict[str, Any] = {name: column(name) for name in names}
    record = join_records([part.record for part in parts])
    return Transitions(seen("before"), seen("after"), **columns, record=record)


def _first(counts: Array) -> Array:
    """int64 [n]: where each of n parts begins that lie one after the other."""
    return np.cumsum(counts) - counts
