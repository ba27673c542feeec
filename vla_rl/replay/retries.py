"""Episodes that were lost with their worker. One that is lost twice is played once more, alone in its worker.

A worker plays several episodes at a time, and one of them may be what ends it. The others were lost with it and are
innocent: played alone, only the guilty one is lost for the third time. A first loss may have any reason.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from vla_rl.core.records import EpisodeSpec


class Retries:
    """Not thread-safe: the store calls it under its lock."""

    def __init__(self) -> None:
        self._waiting: deque[EpisodeSpec] = deque()
        self._losses: dict[EpisodeSpec, int] = {}  # of episodes, without their ids, that have not ended since
        self._emptying = set[int]()  # workers that get nothing more until they are idle

    def __iter__(self) -> Iterator[EpisodeSpec]:
        """Those that wait for a worker."""
        return iter(self._waiting)

    def lost(self, episode: EpisodeSpec, blame: bool = True) -> int:
        """How often it has been lost: after the second time it waits here, after the third it is forgotten.

        Without ``blame`` this time does not count.
        """
        content = _content(episode)
        times = self._losses.get(content, 0) + blame
        if blame:
            self._losses[content] = times
        if times == 2:
            self._waiting.append(episode)
        elif times > 2:
            del self._losses[content]
        return times

    def ended(self, episode: EpisodeSpec) -> None:
        """Forget an episode that will not be played again."""
        self._losses.pop(_content(episode), None)

    def give_up(self, group: int) -> None:
        """Play no more of the training episodes of a group."""
        for episode in [e for e in self._waiting if e.group == group and not e.evaluation]:
            self._waiting.remove(episode)
            self.ended(episode)
        self._release()

    def worker_lost(self, worker: int) -> None:
        self._emptying.discard(worker)

    def reserves(self, worker: int, own: Iterable[EpisodeSpec]) -> bool:
        """Whether a worker that plays its ``own`` episodes may get no other one now: it retries one, or will as soon as
        it is idle. As many workers are kept free as episodes wait for one."""
        own = list(own)
        if any(self._losses.get(_content(episode), 0) > 1 for episode in own):
            return True
        if not own or not (worker in self._emptying or len(self._emptying) < len(self._waiting)):
            return False
        self._emptying.add(worker)
        return True

    def take(self, worker: int) -> EpisodeSpec | None:
        """The next one for a worker that plays nothing, which will play it alone."""
        self._emptying.discard(worker)
        episode = self._waiting.popleft() if self._waiting else None
        self._release()
        return episode

    def _release(self) -> None:
        while len(self._emptying) > len(self._waiting):
            self._emptying.pop()


def _content(episode: EpisodeSpec) -> EpisodeSpec:
    return replace(episode, id=0)
