"""The order of cameras, where only their names tell what they see."""

from collections.abc import Iterable

_OF_THE_WRIST = ("wrist", "image2", "hand", "gripper")


def wrist_last(names: Iterable[str]) -> list[str]:
    """Our order of views: those of the wrist last, else as given."""
    return sorted(names, key=lambda name: any(word in name for word in _OF_THE_WRIST))  # stable
