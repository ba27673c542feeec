"""Problems of a config as text: one line per problem, with the value found, its place and the remedy."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.plugins import PluginConfig, PluginError, installed

KeyPath = tuple[str | int, ...]
NO_VALUE = object()
_SHOWN = 40  # problems

_NOT_TEXT = re.compile(r"[-+.\deE_]*\d[-+.\deE_]*|null|true|false|~")

_WRONG_TYPE = {
    "int": "must be a whole number, written without point, exponent or quotes",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text: put it in quotes",
    "tuple": "must be a list, such as [0,1]",
}
_OUT_OF_RANGE = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
}
_RENAMED = {  # keys and values of earlier versions
    "train.max_age": "train.max_staleness",
    "placement.slots_per_worker": "placement.envs_per_worker",
    "env.implementation=untouched": "reference",
    "env.assets=stand-ins": "placeholder",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to correct."""

    key: KeyPath
    text: str  # what is wrong, and the remedy
    value: Any = NO_VALUE
    place: str = ""  # "file:line", "command line", or empty for a default

    def __str__(self) -> str:
        text = shown(self.value)
        value = "" if self.value is NO_VALUE else f"={text if len(text) <= 60 else text[:57] + '...'}"
        place = f" ({self.place})" if self.place else ""
        return f"{dotted(self.key)[:200]}{value}{place}: {self.text}"


class ConfigError(UserError):
    """A config cannot be used; ``problems`` holds one line for each thing to correct."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(str(problem) for problem in problems)
        count = len(self.problems)
        head = "the config has a problem:" if count == 1 else f"the config has {count} problems:"
        rest = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
        super().__init__("\n  ".join((head, *self.problems[:_SHOWN], *rest)))


def dotted(key: KeyPath) -> str:
    """``("env", "tasks", 0)`` as ``env.tasks[0]``."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: Any) -> str:
    """``value`` as written in YAML: text has quotes only where it would be read as something else without."""
    bare = isinstance(value, str) and value.strip() and not _NOT_TEXT.fullmatch(value)
    return value if bare else json.dumps(value, default=str)


def kinds(group: str) -> dict[str, type[BaseModel]]:
    """The classes of a group of ``RunConfig`` by their name; empty for a group of one kind."""
    return RunConfig.kinds(group)


def own_kinds(group: str) -> dict[str, type[BaseModel]]:
    """Of ``kinds``, those that come with this project."""
    return {name: kind for name, kind in kinds(group).items() if not issubclass(kind, PluginConfig)}


def default_kind(group: str) -> str:
    return RunConfig.model_fields[group].get_default(call_default_factory=True).name


def explain(error: ErrorDetails, data: Mapping[str, Any]) -> Problem:
    """One of pydantic's errors about ``data`` in words."""
    key, kind, found = _key(error), error["type"], error["input"]
    context = error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return Problem(key, f"unknown key; {_suggest_key(key, data)}", found)
        case "union_tag_invalid":
            return Problem((*key, "name"), _unknown_kind(str(key[0]), context["tag"]), context["tag"])
        case "literal_error":
            return Problem(key, _suggest_value(key, found, _literals(key, data)), found)
        case "model_type" | "dict_type":
            return Problem(key, f"is a group of keys; set one of {_listed(key, data)}", found)
        case "value_error":
            return Problem(key, str(context["error"]), found if isinstance(found, str) else NO_VALUE)
        case "missing":  # all keys have defaults: this is an item of a list
            return Problem(key, "has too few items", found)
    if kind in _OUT_OF_RANGE:
        return Problem(key, _OUT_OF_RANGE[kind].format(**context), found)
    return Problem(key, _WRONG_TYPE.get(kind.split("_")[0], error["msg"]), found)


def _key(error: ErrorDetails) -> KeyPath:
    """The key to correct: without the kind that pydantic puts after the name of a group of several kinds."""
    key = error["loc"][:-1] if error["type"] == "missing" else error["loc"]
    return (key[0], *key[2:]) if kinds(str(key[0])) else key


def _classes(owner: type[BaseModel], name: str) -> list[type[BaseModel]]:
    info = owner.model_fields.get(name)
    candidates = (get_args(info.annotation) or (info.annotation,)) if info is not None else ()
    return [member for member in candidates if isinstance(member, type) and issubclass(member, BaseModel)]


def _group(key: KeyPath, data: Mapping[str, Any]) -> type[BaseModel]:
    """The class of the group at ``key``, for the kind that ``data`` selects."""
    group: type[BaseModel] = RunConfig
    for part in map(str, key):
        found = _classes(group, part)
        if len(found) > 1:
            values = data.get(part)
            selected = values.get("name") if isinstance(values, Mapping) else None
            group = kinds(part).get(str(selected), found[0])
        elif found:
            group = found[0]
    return group


def _literals(key: KeyPath, data: Mapping[str, Any]) -> list[str]:
    """Allowed values of the key; of a list, those of its items."""
    names = [part for part in key if isinstance(part, str)]
    pending = [_group(tuple(names[:-1]), data).model_fields[names[-1]].annotation]
    values: list[str] = []
    while pending:
        annotation = pending.pop(0)
        if get_origin(annotation) is Literal:
            values += get_args(annotation)
        else:
            pending += get_args(annotation)
    return values


def _listed(key: KeyPath, data: Mapping[str, Any]) -> str:
    return ", ".join(dotted((*key, name)) for name in _group(key, data).model_fields)


def _unknown_kind(group: str, name: str) -> str:
    """What to do about a name that selects no kind of a group."""
    try:
        RunConfig.admit(group, name)
    except PluginError as error:
        return str(error)
    allowed = list(dict.fromkeys([*own_kinds(group), *installed(group)]))
    return f"{_suggest_value((group, 'name'), name, allowed)}, or your own as module:Class"


def _suggest_value(key: KeyPath, found: Any, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(found), allowed, n=1)
    renamed = _RENAMED.get(f"{dotted(key)}={found}")
    hint = f"it is now {renamed}; " if renamed else f"did you mean {near[0]}? " if near else ""
    return f"unknown value; {hint}allowed: {', '.join(allowed)}"


def _suggest_key(key: KeyPath, data: Mapping[str, Any]) -> str:
    if renamed := _RENAMED.get(dotted(key)):
        return f"it is now {renamed}"
    above, name = key[:-1], str(key[-1])
    if near := difflib.get_close_matches(name, _group(above, data).model_fields, n=1):
        return f"did you mean {dotted((*above, near[0]))}?"
    if len(key) == 2:
        for other, kind in kinds(str(key[0])).items():
            if name in kind.model_fields:
                selected = _group(above, data).model_fields["name"].default
                return f"it is a key of {key[0]}={other}, and {selected} is selected"
    groups = [group for group in RunConfig.model_fields if _classes(RunConfig, group)]
    leaves = {leaf: f"{group}.{leaf}" for group in groups for leaf in _group((group,), data).model_fields}
    if near := difflib.get_close_matches(name, leaves, n=1, cutoff=0.8):
        return f"did you mean {leaves[near[0]]}?"
    return f"known keys: {_listed(above, data)}"
