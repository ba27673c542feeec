"""Episodes that were lost with their worker. Each is played once more, alone in its worker.

A worker plays several episodes at a time, and one of them may be what ends it. The others were lost with it and are
innocent: played alone, only the guilty one is lost again.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from vla_rl.core.records import EpisodeSpec


class Retries:
    """Not thread-safe: the store calls it under its lock."""

    def __init__(self) -> None:
        self._waiting: deque[EpisodeSpec] = deque()
        self._lost_once = set[EpisodeSpec]()  # without their ids: waiting, or played again now
        self._emptying = set[int]()  # workers that get nothing more until they are idle

    def __iter__(self) -> Iterator[EpisodeSpec]:
        """Those that wait for a worker."""
        return iter(self._waiting)

    def lost(self, episode: EpisodeSpec) -> bool:
        """Keep a lost episode for another attempt. False if it was lost before: it is not kept."""
        if self.ended(episode):
            return False
        self._lost_once.add(_content(episode))
        self._waiting.append(episode)
        return True

    def ended(self, episode: EpisodeSpec) -> bool:
        """Forget an episode that will not be played again; whether it was lost once."""
        content = _content(episode)
        if content not in self._lost_once:
            return False
        self._lost_once.remove(content)
        return True

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
        if any(_content(episode) in self._lost_once for episode in own):
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
