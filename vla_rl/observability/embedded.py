"""Pictures and films as part of a page or a notebook, which then needs no file beside it."""

import base64
import html
from dataclasses import dataclass
from pathlib import Path

_TYPES = {".png": "image/png", ".svg": "image/svg+xml", ".mp4": "video/mp4"}


def data_uri(path: Path) -> str:
    """The content of a file as an address. Raises OSError, and KeyError for a type that is not known."""
    return f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture or a film: a notebook shows it, everything else takes it as the path of its file.

    Attributes:
        path: its file.
        label: what is to be seen, for those who do not see it.
    """

    path: Path
    label: str

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        label = html.escape(self.label)
        rest = f'style="max-width: 100%" src="{data_uri(self.path)}"'
        if self.path.suffix == ".mp4":
            return f'<video controls muted playsinline aria-label="{label}" {rest}></video>'
        return f'<img alt="{label}" {rest}>'
