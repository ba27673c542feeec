"""Where all episodes went."""

from dataclasses import dataclass


@dataclass(slots=True)
class Ledger:
    """started = trained + stale + filtered + evaluated + lost + those still on their way."""

    started: int = 0  # assigned to a worker
    trained: int = 0  # part of a super-batch whose update is done
    stale: int = 0  # finished, but dropped because the episode or another of its group was too stale
    filtered: int = 0  # finished, but dropped because its group's returns or success rate teach nothing
    evaluated: int = 0
    lost: int = 0  # running in a worker that died, or when the run stopped
    reused: int = 0  # uses of trained episodes in further updates; not an end

    @property
    def ended(self) -> int:
        return self.trained + self.stale + self.filtered + self.evaluated + self.lost
