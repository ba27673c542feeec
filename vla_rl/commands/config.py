"""`vla-rl config`: the reference pages of all config keys and of all commands, and a JSON Schema for editors."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from vla_rl.commands.commands_docs import commands_docs
from vla_rl.config.messages import kinds, own_kinds, shown
from vla_rl.config.run_config import RunConfig
from vla_rl.config.yaml_file import BASE
from vla_rl.core.plugins import GROUPS, PluginError, installed

_INTRODUCTION = """# Configuration

All keys of a run. `vla-rl config docs` prints this page from the schema.

- A YAML file sets keys in groups; overrides on the command line set them by their dotted names:
  `vla-rl train configs/tabletop.yaml train.iterations=2 env.tasks=[push]`.
- Every key is optional. `base: FILE` names another config file that this one changes, relative to its own folder, or
  one that comes with vla_rl by its name: `base: libero_ppo`.
- Relative files and folders (`policy.checkpoint`, `sft.demos`, ...) are searched next to the config file that names
  them, then in the working folder, then among what comes with vla_rl.
- `env: NAME` and `algo: NAME` (`env=NAME` on the command line) select a simulator and an algorithm with its defaults;
  `module:Class` one of your own ([own environment](tutorials/own_environment.md), [policy](tutorials/own_policy.md),
  [algorithm](tutorials/own_algorithm.md)). `vla-rl list` shows what is installed.
- Editors with a YAML language server complete and check config files: write the schema with
  `vla-rl config schema > vla_rl.schema.json`, and name it in the first line of a config file:
  `# yaml-language-server: $schema=vla_rl.schema.json`.
"""
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def config_command(args: Any) -> int:
    """Print what ``args.what`` names: "docs", "schema" or "commands"."""
    pages = {"docs": config_docs, "schema": lambda: json.dumps(config_schema(), indent=2), "commands": commands_docs}
    print(pages[args.what]())
    return 0


def config_schema() -> dict[str, Any]:
    """JSON Schema of a config file, with the parts of other packages that are installed. Checks for combinations of
    keys are not part of it."""
    for group in GROUPS:
        for name in installed(group):
            with suppress(PluginError):  # `vla-rl list` tells what is wrong
                RunConfig.admit(group, name)
    schema = RunConfig.model_json_schema()
    properties = schema["properties"]
    for group in filter(kinds, properties):
        names = [kind.__name__ for kind in kinds(group).values()]
        # Not oneOf: a file without a name may change a base of any kind.
        forms = [{"enum": list(kinds(group))}, *({"$ref": f"#/$defs/{name}"} for name in names)]
        properties[group] = {"anyOf": forms, "description": f"The name of one, or its keys: {', '.join(kinds(group))}."}
    properties[BASE] = {"type": "string", "description": "Config file that this one changes, relative to its folder."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def config_docs() -> str:
    """The reference page, docs/configuration.md."""
    schema = RunConfig.model_json_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    groups = {name: spec["$ref"].split("/")[-1] for name, spec in properties.items() if "$ref" in spec}
    single = {name: spec for name, spec in properties.items() if name not in groups and not kinds(name)}
    parts = [_INTRODUCTION, "## Top level\n", *_table(_rows("", {"properties": single}, definitions))]
    for name in properties:
        if name in groups:
            definition = definitions[groups[name]]
            parts += [f"\n## {name}\n", _plain(definition), "", *_table(_rows(name, definition, definitions))]
        elif kinds(name):
            parts += _kinds_section(name, definitions)
    return "\n".join(parts)


def _kinds_section(group: str, definitions: dict[str, Any]) -> list[str]:
    """A group of several kinds: the keys that all share, then those of each kind."""
    found = {name: definitions[kind.__name__] for name, kind in own_kinds(group).items()}
    rows = {name: list(_rows(group, definition, definitions)) for name, definition in found.items()}
    shared = [row for row in next(iter(rows.values())) if all(row in others for others in rows.values())]
    parts = [f"\n## {group}\n", f"One of {', '.join(f'`{group}={name}`' for name in found)}. Keys of all:\n"]
    parts += _table(shared)
    for name, definition in found.items():
        own = [row for row in rows[name] if row not in shared]
        parts += [f"\n### {group}={name}\n", _plain(definition), "", *_table(own)]
    return parts


def _rows(group: str, definition: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    for name, spec in definition["properties"].items():
        if "const" in spec:  # the name of a kind
            continue
        key = f"{group}.{name}" if group else name
        cells = f"`{key}`", _allowed(spec), f"`{shown(spec['default'])}`", _plain(spec)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        for form in spec.get("anyOf", ()):
            if "$ref" in form:
                yield from _rows(key, definitions[form["$ref"].split("/")[-1]], definitions)


def _table(rows: Iterable[str]) -> list[str]:
    return ["| Key | Value | Default | Meaning |", "|---|---|---|---|", *rows]


def _allowed(spec: dict[str, Any]) -> str:
    """Type, allowed values and limits of a key, from its JSON Schema."""
    if "anyOf" in spec:
        return " or ".join(map(_allowed, spec["anyOf"]))
    if "$ref" in spec:
        return "group of keys"
    if "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec["enum"])
    if spec["type"] == "array":
        if "prefixItems" in spec:
            return f"list of {len(spec['prefixItems'])}: {_allowed(spec['prefixItems'][0])}"
        return f"{'non-empty ' if spec.get('minItems') else ''}list of: {_allowed(spec['items'])}"
    kind = {"string": "text", "boolean": "`true`, `false`", "null": "`null`"}.get(spec["type"], spec["type"])
    limits = ", ".join(f"{sign} {spec[name]:.12g}" for name, sign in _LIMITS.items() if name in spec)
    return f"{kind} {limits}".strip()


def _plain(spec: dict[str, Any]) -> str:
    return spec.get("description", "").replace("``", "`")
