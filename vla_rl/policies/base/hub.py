"""Names of checkpoints on the model hub; does not load torch."""

import re
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(checkpoint: str | Path) -> bool:
    """Whether this can only be OWNER/NAME on the model hub: no such path exists, nor its first folder."""
    text = str(checkpoint)
    return _HUB_ID.fullmatch(text) is not None and not Path(text).exists() and not Path(text).parent.is_dir()
