"""Reads a ``RunConfig`` from a YAML file and ``key=value`` overrides, and writes it back as YAML.

One error reports all problems: malformed overrides, duplicate and unknown keys, wrong types, values out of range and
combinations that cannot run (``config_checks``). Each problem is one line with its place and its remedy.
"""

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from vla_rl.config.checks import Check, config_checks
from vla_rl.config.messages import ConfigError, KeyPath, Problem, default_kind, explain, kinds
from vla_rl.config.run_config import RunConfig
from vla_rl.config.yaml_file import BASE, UNREADABLE, ConfigFile, parse_value, read_config_files
from vla_rl.core.plugins import GROUPS, PluginError, imports_code, reference_to
from vla_rl.core.shipped import find_input

__all__ = ["ConfigError", "dump_config", "load_config", "modules_named"]

COMMAND_LINE = "command line"
ARGUMENT = "argument"  # of a call from Python
_LARGEST_INT = 2**31 - 1  # what indices of arrays hold
_PPO_IN_IMAGINATION = "world_model"  # as the name of an algorithm: PPO with a world model
_OVERRIDE_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


Source = Path | str | Mapping[str, Any] | None  # of a config: a file, the name of a shipped one, or its values


def load_config(
    source: Source, overrides: Sequence[str] | Mapping[str, Any] = (), checks: Sequence[Check] = ()
) -> RunConfig:
    """Read the file ``source``, which changes the defaults or its ``base`` file, then apply ``overrides`` in order.

    ``source`` may be the name of a config that comes with vla_rl (``libero_ppo``), or the values of one as a mapping.

    An override is ``key.of.group=VALUE`` with VALUE in YAML: ``train.iterations=2``, ``env.tasks=[0,1]``,
    ``log.name=null``; or a mapping, ``{"train.iterations": 2}``. ``env=NAME`` and ``algo=NAME`` select a simulator or
    an algorithm: another name than the selected one starts from that one's defaults; ``module:Class`` selects one of
    another package (``vla_rl.core.plugins``). A file may use the same short form. ``algo=world_model`` is ``algo=ppo
    world_model={}``.

    ``checks`` run in addition to ``config_checks``; ``vla_rl.placement.checks.load_checked_config`` passes those of
    this machine. Raises ConfigError with all problems.
    """
    draft = _Draft()
    files = _files(source)
    for file in files:
        draft.problems += file.problems
        draft.assign((), file.values, "")
        draft.places |= file.places
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            draft.assign(tuple(name.split(".")), _plain(value), ARGUMENT)
    else:
        for text in overrides:
            _apply_override(text, draft)
    for key, value in list(_leaves(draft.data)):
        if isinstance(value, str) and "${" in value:
            draft.refuse(Problem(key, "interpolation is not supported; write the value itself", value))
        elif isinstance(value, float) and not math.isfinite(value):
            draft.refuse(Problem(key, "must be a finite number", value))
        elif isinstance(value, int) and abs(value) > _LARGEST_INT and key != ("seed",):
            draft.refuse(Problem(key, f"must be at most {_LARGEST_INT}", value))
    config = _validated(draft)
    if config is not None:
        config = config.with_values({key: draft.found(key, value) for key, value in config.input_paths().items()})
    if all(file.readable for file in files) and config is not None:
        for check in (*config_checks(), *checks):
            # A check that reads a refused key would judge the default in its place.
            if not any(map(draft.was_refused, check.reads)):
                draft.problems += [draft.placed(problem) for problem in check.find(config)]
    if draft.problems or config is None:
        raise ConfigError(draft.problems)
    return config


def _files(source: Source) -> list[ConfigFile]:
    if source is None:
        return []
    if not isinstance(source, Mapping):
        return read_config_files(Path(source))
    values = _plain(source)
    base = values.pop(BASE, None)
    here = ConfigFile(values, dict.fromkeys((key for key, _ in _leaves(values)), ARGUMENT))
    return [*([] if base is None else read_config_files(Path(base))), here]


def _plain(value: Any) -> Any:
    """The value of a config in terms of YAML: paths as text, tuples as lists, a class as the name of its plug-in."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, type):
        return reference_to(value)
    return str(value) if isinstance(value, Path) else value


def modules_named(source: Source) -> list[str]:
    """``KEY=VALUE`` of everything in a config that would import a module if the config was loaded. Imports nothing."""
    named = []
    for file in _files(source):
        for key, value in _leaves(file.values):
            if key and key[0] in GROUPS and imports_code(value):
                named.append(f"{'.'.join(map(str, key)).removesuffix('.name')}={value}")
    return named


def dump_config(config: RunConfig) -> str:
    """All keys as YAML; ``load_config`` reads an equal config from it."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


@dataclass(slots=True)
class _Draft:
    """A config that is being read: plain data, the place where each value was given, and the problems so far."""

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: list[KeyPath] = field(default_factory=list)

    def assign(self, key: tuple[str, ...], value: Any, place: str) -> None:
        """Set ``key``, or merge a mapping into it. A new name in a group of several kinds drops the old kind's keys."""
        if len(key) == 1 and kinds(key[0]) and isinstance(value, str):
            key = (*key, "name")
        if key == ("algo", "name") and value == _PPO_IN_IMAGINATION:
            self.assign(("world_model",), self.data.get("world_model") or {}, place)
            value = "ppo"
        if len(key) == 2 and key[1] == "name" and isinstance(value, str) and kinds(key[0]):
            with suppress(PluginError):  # ``explain`` tells what is wrong
                RunConfig.admit(key[0], value)
        if isinstance(value, Mapping) and (value or not key):
            for name in sorted(value, key=lambda name: name != "name"):  # select a kind before setting its keys
                self.assign((*key, str(name)), value[name], place)
            return
        if len(key) == 2 and key[1] == "name" and kinds(key[0]) and value != self._selected(key[0]):
            self.data[key[0]] = {}
        group = self.data
        for part in key[:-1]:
            if not isinstance(group.get(part), dict):
                group[part] = {}
            group = group[part]
        if value != {} or not isinstance(group.get(key[-1]), dict):
            group[key[-1]] = value
            self.places[key] = place

    def refuse(self, problem: Problem) -> None:
        """Report a problem and remove its value, so that the rest can be validated."""
        self.problems.append(self.placed(problem))
        self.remove(problem.key)

    def remove(self, key: KeyPath) -> None:
        """Remove a value: the whole list if one item is wrong, the whole group if its kind is unknown."""
        names = [part for part in key if isinstance(part, str)]
        if len(names) == 2 and names[1] == "name" and kinds(names[0]):
            names.pop()
        self.refused.append(tuple(names))
        group: Any = self.data
        for name in names[:-1]:
            group = group.get(name, {})
        group.pop(names[-1], None)

    def was_refused(self, key: KeyPath) -> bool:
        """Whether ``key``, a key in it or a group around it was removed."""
        return any(key[: len(gone)] == gone[: len(key)] for gone in self.refused)

    def placed(self, problem: Problem) -> Problem:
        """``problem`` with the place of its key, or of the first key given in its group."""
        key = tuple(part for part in problem.key if isinstance(part, str))
        inside = (place for given, place in self.places.items() if given[: len(key)] == key)
        return replace(problem, place=problem.place or self.places.get(key) or next(inside, ""))

    def found(self, key: str, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """The files and folders that a key names, relative ones as ``find_input`` finds them."""
        file, _, line = self.places.get(tuple(key.split(".")), "").rpartition(":")
        folder = Path(file).parent if line.isdecimal() else None
        if isinstance(value, str):
            return find_input(value, folder)
        return tuple(find_input(text, folder) for text in value)

    def _selected(self, group: str) -> Any:
        values = self.data.get(group)
        return values.get("name", default_kind(group)) if isinstance(values, dict) else default_kind(group)


def _validated(draft: _Draft) -> RunConfig | None:
    """The config with defaults in place of refused values; None if that is not valid either."""
    for _ in range(4):
        for group in filter(kinds, RunConfig.model_fields):
            values = draft.data.setdefault(group, {})
            if isinstance(values, dict):
                values.setdefault("name", default_kind(group))
        try:
            # Through JSON: its strict mode accepts a list for a tuple, but neither "3" nor true for a number.
            return RunConfig.model_validate_json(json.dumps(draft.data, default=str), strict=True)
        except ValidationError as failure:
            selected = copy.deepcopy(draft.data)
            earlier = list(draft.refused)
            errors = failure.errors(include_url=False)
            wrong = [error["loc"] for error in errors]
            for error in errors:
                if any(error["loc"] == place[: len(error["loc"])] != place for place in wrong):
                    continue  # a list without its wrong items
                problem = explain(error, selected)
                if any(problem.key == gone[: len(problem.key)] for gone in earlier):
                    draft.remove(problem.key)  # caused by a default in place of a refused value
                else:
                    draft.refuse(problem)
    return None


def _leaves(value: Any, key: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, (dict, list)):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*key, part))
    else:
        yield key, value


def _apply_override(text: str, draft: _Draft) -> None:
    name, equals, value = text.partition("=")
    if not equals or not _OVERRIDE_KEY.fullmatch(name):
        remedy = "is not an override; write KEY=VALUE, such as train.iterations=2"
        draft.problems.append(Problem((text,), remedy, place=COMMAND_LINE))
        return
    key = tuple(name.split("."))
    try:
        draft.assign(key, parse_value(value), COMMAND_LINE)
    except (yaml.YAMLError, OmegaConfBaseException, *UNREADABLE):
        draft.refuse(Problem(key, "is not valid YAML; close its brackets and quotes", value, COMMAND_LINE))
