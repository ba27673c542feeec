"""How an environment of gymnasium says that its task is solved (``env.success``)."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envs.base import EnvError
from envs.gymnasium.spaces import as_array

TERMINATED, REWARD = "terminated", "reward"
_USUAL = ("is_success", "success")


@dataclass(frozen=True)
class Success:
    """``key``: of a step's info, a/b for b within a; ``terminated`` or ``reward``."""

    key: str

    @classmethod
    def choose(cls, wanted: str | None, seen: Collection[str]) -> "Success":
        """``seen``: names in infos. Raises EnvError if nothing is configured, and nothing usual seen."""
        key = wanted or next((name for name in _USUAL if name in seen), None)
        if key is None:
            raise EnvError(
                f"nothing says when its task is solved: its infos have {', '.join(seen) or 'no keys'}; set env.success "
                f"to such a key, to {TERMINATED} (every end that is no truncation) or to {REWARD} (an end with a "
                "positive reward)"
            )
        return cls(key)

    def of(self, info: Mapping[str, Any], terminated: bool, reward: float) -> bool:
        """Of one step; a key that is absent says no. Raises EnvError for a value that is neither true nor false."""
        if self.key == TERMINATED:
            return terminated
        if self.key == REWARD:
            return terminated and reward > 0
        return any(_truth(self.key, value) for name, value in names_in(info) if name == self.key)

    def note(self, seen: Collection[str], steps: int) -> str:
        """How success is decided, for people."""
        if self.key == TERMINATED:
            return "success: every end that is no truncation"
        if self.key == REWARD:
            return "success: an end, no truncation, with a positive reward"
        if self.key in seen:
            return f"success: {self.key} in a step's info"
        found = ", ".join(seen) or "no keys"
        return f"success: {self.key} in a step's info, not seen in {steps} steps of random actions (there were {found})"


def names_in(info: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of an info by name; a/b for b within a."""
    for key, value in info.items():
        yield f"{above}{key}", value
        if isinstance(value, Mapping):
            yield from names_in(value, f"{above}{key}/")


def _truth(key: str, value: Any) -> bool:
    array = as_array(value)
    if array.size == 1 and array.dtype.kind in "biuf" and array.item() in (0, 1):
        return bool(array.item())
    raise EnvError(
        f"env.success={key}: a step's info says {value!r}, and needs true, false, 1 or 0: name another key, or convert "
        "it in a wrapper"
    )
