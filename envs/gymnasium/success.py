"""How an environment of gymnasium says that its task is solved (``env.success``)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.base import EnvError
from envs.gymnasium.spaces import as_array

_USUAL = ("is_success", "success")
_ENDS = {"terminated": "every end that is no truncation", "reward": "an end, no truncation, with a positive reward"}


@dataclass(frozen=True)
class Success:
    """``key``: of a step's info, a/b for b within a; ``terminated`` or ``reward``; empty where nothing says it.

    ``note``: the same, for people.
    """

    key: str
    note: str

    @classmethod
    def choose(cls, wanted: str | None, infos: Sequence[Mapping[str, Any]]) -> "Success":
        """``infos``: of some steps."""
        seen = dict.fromkeys(name for info in infos for name, _ in _named(info))
        found = ", ".join(seen) or "no keys"
        key = wanted or next((name for name in _USUAL if name in seen), "")
        missing = "" if key in seen else f", not seen in {len(infos)} steps of random actions (there were {found})"
        unknown = (
            f"nothing says when its task is solved: its infos have {found}; set env.success to such a key, to "
            "terminated (every end that is no truncation) or to reward (an end with a positive reward)"
        )
        return cls(key, f"success: {_ENDS.get(key, f'{key} in an info{missing}')}" if key else unknown)

    def check(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Raises EnvError if nothing says it, or as ``of``."""
        for info in infos:
            self.of(info, terminated=not self.key, reward=0.0)

    def of(self, info: Mapping[str, Any], terminated: bool, reward: float) -> bool:
        """Of one step; a key that is absent says no.

        Raises EnvError for a value that is neither true nor false, and for an end of which nothing says what it is.
        """
        if not self.key and terminated:
            raise EnvError(self.note)
        if self.key in _ENDS:
            return terminated and (self.key == "terminated" or reward > 0)
        return any(_truth(self.key, value) for name, value in _named(info) if name == self.key)


def _named(info: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in info.items():
        yield f"{above}{key}", value
        if isinstance(value, Mapping):
            yield from _named(value, f"{above}{key}/")


def _truth(key: str, value: Any) -> bool:
    array = as_array(value)
    if array.size == 1 and array.dtype.kind in "biuf" and array.item() in (0, 1):
        return bool(array.item())
    raise EnvError(
        f"env.success={key}: an info says {value!r}, and needs true, false, 1 or 0: name another key, or convert it"
    )
