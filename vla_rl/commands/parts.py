"""`vla-rl list`: what a config can select here, with what other packages bring."""

from typing import Any

from rich.table import Table

from vla_rl.config.messages import own_kinds
from vla_rl.core.files import write_json
from vla_rl.core.plugins import GROUPS, PluginError, installed, plugin_config
from vla_rl.core.shipped import CONFIGS
from vla_rl.observability.console import make_console


def list_command(args: Any) -> int:
    """Print all parts and configs. A part that cannot be imported is listed with the reason."""
    parts = [part for group in GROUPS for part in parts_of(group)]
    configs = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
    table = Table("select with", "from", "what it is", box=None, pad_edge=False)
    for part in parts:
        table.add_row(f"{part['group']}={part['name']}", part["origin"], part["about"])
    console = make_console()
    console.print(table)
    console.print(f"\nor your own as module:Class. Configs by name: {', '.join(configs)}", highlight=False)
    if args.json:
        write_json(args.json, {"parts": parts, "configs": configs})
    return 0


def parts_of(group: str) -> list[dict[str, str]]:
    """JSON-able: the parts of a group of the config, those of other packages last."""
    own = [(name, "vla_rl", _about(kind)) for name, kind in own_kinds(group).items()]
    others = []
    for name, point in installed(group).items():
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "another package"
        try:
            others.append((name, package, _about(plugin_config(group, name))))
        except PluginError as error:
            others.append((name, package, f"cannot be used: {error}"))
    return [{"group": group, "name": name, "origin": origin, "about": about} for name, origin, about in (*own, *others)]


def _about(kind: type) -> str:
    return next(iter((kind.__doc__ or "").strip().splitlines()), "").replace("``", "`")
