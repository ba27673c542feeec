"""How to install what a part needs, in words that can be pasted: for error messages and `vla-rl doctor`."""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

_SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"
# Installed with --no-deps after an extra's packages: they declare what nothing here imports (docs/installation.md).
WITHOUT_DEPENDENCIES = {
    "libero": ("hf-libero==0.1.4", "robosuite==1.4.0", "bddl==1.0.1"),
    "maniskill": ("mani_skill==3.0.1", "sapien==3.0.3"),
    "metaworld": ("metaworld==3.1.1",),
}
_OF_EXTRA = re.compile(r"""\s*;\s*extra\s*==\s*["'](\w+)["']""")


def install_command(extra: str) -> str:
    """Installs the packages of an extra of vla_rl. They come from the package index, whichever way vla_rl came."""
    if _SETUP.is_file():
        return "bash scripts/setup.sh"
    try:
        declared = requires("vla_rl") or []
    except PackageNotFoundError:
        declared = []
    wanted = [_OF_EXTRA.sub("", text) for text in declared if (found := _OF_EXTRA.search(text)) and found[1] == extra]
    commands = [f"pip install {shlex.join(wanted)}"] if wanted else []
    if extra in WITHOUT_DEPENDENCIES:
        commands.append(f"pip install --no-deps {shlex.join(WITHOUT_DEPENDENCIES[extra])}")
    return " && ".join(commands)
