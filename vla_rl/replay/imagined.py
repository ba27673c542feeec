"""The store's part of imagination: which imagined episodes belong to which real one, and their own ledger."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vla_rl.core.records import Trajectory


@dataclass(slots=True)
class ImaginedLedger:
    """Where all imagined episodes went: delivered = trained + unused + lost + those that wait.

    They are never mixed with real ones. The world model's process counts how many it has played.
    """

    delivered: int = 0
    trained: int = 0  # part of a super-batch
    unused: int = 0  # the audit failed, or the real episode was dropped
    lost: int = 0  # waited for their super-batch when the run stopped


class Bundles:
    """Imagined episodes that wait for the super-batch of the real episode from which they start."""

    def __init__(self) -> None:
        self.ledger = ImaginedLedger()
        self.passed = False  # whether the newest bundle may be trained on
        self._waiting: dict[int, tuple[list[Trajectory], bool]] = {}  # by the real episode's id

    def add(self, episode_id: int, imagined: Sequence[Trajectory], passed: bool, wanted: bool) -> None:
        """``passed``: by the audit; ``wanted``: whether the real episode still waits to be trained."""
        self.passed = passed
        self.ledger.delivered += len(imagined)
        if wanted:
            self._waiting[episode_id] = list(imagined), passed
        else:
            self.ledger.unused += len(imagined)

    def complete(self, episodes: Iterable[Trajectory]) -> bool:
        """Whether the bundles of all these real episodes are here."""
        return all(t.episode.id in self._waiting for t in episodes)

    def excuse(self, episodes: Iterable[Trajectory]) -> None:
        """Nothing is imagined from these; they are trained without."""
        self._waiting.update({t.episode.id: ([], True) for t in episodes})

    def take(self, episodes: Iterable[Trajectory], *, use: bool) -> list[Trajectory]:
        """What is trained together with these real episodes: with ``use``, their bundles that passed.

        None wait any longer.
        """
        found = [self._waiting.pop(t.episode.id, ([], False)) for t in episodes]
        taken = [t for imagined, passed in found if passed and use for t in imagined]
        self.ledger.trained += len(taken)
        self.ledger.unused += sum(len(imagined) for imagined, _ in found) - len(taken)
        return taken

    def drop_except(self, episodes: Iterable[Trajectory]) -> None:
        """Forget the bundles of all other real episodes, which have been dropped."""
        kept = {t.episode.id for t in episodes}
        for episode_id in [i for i in self._waiting if i not in kept]:
            self.ledger.unused += len(self._waiting.pop(episode_id)[0])

    @property
    def waiting(self) -> int:
        return sum(len(imagined) for imagined, _ in self._waiting.values())

    def counters(self) -> dict[str, int]:
        """The ledger and what waits; the sums agree at any moment."""
        counts = asdict(self.ledger) | {"waiting": self.waiting}
        return {f"imagined_{name}": value for name, value in counts.items()}

    def state(self) -> dict[str, Any]:
        """JSON-able, for a checkpoint; what waits is not kept."""
        return asdict(self.ledger) | {"lost": self.ledger.lost + self.waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state()``."""
        self.ledger = ImaginedLedger(**state)
