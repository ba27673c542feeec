"""Reads YAML config files and their bases as plain values, with the line of each key."""

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from vla_rl.config.messages import KeyPath, Problem
from vla_rl.core.errors import UserError
from vla_rl.core.shipped import CONFIGS, find_config

_LARGEST = 1 << 20  # characters; the largest config that comes with vla_rl has a few thousand
_DEEPEST = 100  # brackets within brackets
UNREADABLE = (ValueError, RecursionError)  # numbers of thousands of digits, thousands of nested brackets
BASE = "base"  # key of a file: the config file that it changes, relative to its own folder, or one of CONFIGS


@dataclass(slots=True)
class ConfigFile:
    """The values of a file, and the problems of its form."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)  # "file:line" of each key
    problems: list[Problem] = field(default_factory=list)
    readable: bool = True  # False: values are missing


def parse_value(text: str) -> Any:
    """Parse YAML as OmegaConf does (``1e-4`` is a number). Raises yaml.YAMLError, OmegaConfBaseException or one of
    ``UNREADABLE``."""
    _refuse_deep(text)
    return _plain(OmegaConf.from_dotlist([f"value={text}"]))["value"]


def read_config_files(path: Path) -> list[ConfigFile]:
    """Read ``path`` and its chain of bases, the innermost base first. Mistakes in them are in ``problems``."""
    path = find_config(path)
    files = [read_config_file(path)]
    if not files[0].readable:
        return files
    seen = [path.resolve()]
    while (base := files[0].values.pop(BASE, None)) is not None:
        place = files[0].places.pop((BASE,), "")
        beside = path.parent / str(base)
        path = beside if beside.is_file() or not find_config(str(base)).is_file() else find_config(str(base))
        wrong = "is this file itself, or changes it; name another" if path.resolve() in seen else ""
        if not path.is_file():
            wrong = f"there is no file {path}; name one relative to this file, or a config that comes with vla_rl"
            files[0].readable = False
        if wrong:
            files[0].problems.append(Problem((BASE,), wrong, base, place))
            break
        seen.append(path.resolve())
        files.insert(0, read_config_file(path))
    return files


def read_config_file(path: Path) -> ConfigFile:
    """Read ``path`` without its base. Mistakes in it do not raise, but are in ``problems``."""
    file = ConfigFile()
    place, wrong = str(path), ""
    try:
        file.values = _read(path, file)
    except FileNotFoundError:
        wrong = f"does not exist{_shipped()}"
    except (OSError, UnicodeDecodeError) as error:  # before UNREADABLE, which holds the second one's base
        wrong = f"cannot be read ({error}); name a YAML text file"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else place
        wrong = f"not valid YAML: {error.problem or error.context}; correct this line or the one before"
    except (yaml.YAMLError, OmegaConfBaseException, *UNREADABLE) as error:
        wrong = f"not valid YAML: {str(error).splitlines()[0][:200]}"
    if wrong:
        file.readable = False
        file.problems.append(Problem((place,), wrong))
    return file


def _read(path: Path, file: ConfigFile) -> dict[str, Any]:
    text = read_text(path)
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=event.start_mark)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise yaml.MarkedYAMLError(problem="expected groups of KEY: VALUE", problem_mark=root.start_mark)
    _note_keys(root, (), path, file)
    return _plain(OmegaConf.create(yaml.serialize(root)))


def read_text(path: Path) -> str:
    """The text of a small file or a pipe. Raises OSError, UnicodeDecodeError, or ValueError if it is large or deep."""
    with path.open(encoding="utf-8") as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"it is longer than {_LARGEST} characters")
    _refuse_deep(text)
    return text


def _refuse_deep(text: str) -> None:
    """Raise ValueError for more open brackets than any config has: parsing them takes quadratic time."""
    steps = (1 if c in "[{" else -1 for c in text if c in "[]{}")
    if max(accumulate(steps), default=0) > _DEEPEST:
        raise ValueError(f"it has more than {_DEEPEST} brackets within each other")


def _note_keys(group: yaml.MappingNode, above: KeyPath, path: Path, file: ConfigFile) -> None:
    """Note the line of each key. Report and remove the second of two equal keys."""
    seen: dict[str, int] = {}
    for pair in list(group.value):
        name, line = str(pair[0].value), pair[0].start_mark.line + 1
        key = (*above, name)
        if name in seen:
            file.problems.append(Problem(key, f"given before on line {seen[name]}; keep one", place=f"{path}:{line}"))
            group.value.remove(pair)
            continue
        seen[name] = line
        file.places[key] = f"{path}:{line}"
        if isinstance(pair[1], yaml.MappingNode):
            _note_keys(pair[1], key, path, file)


def _plain(values: Any) -> dict[str, Any]:
    return OmegaConf.to_container(values)  # type: ignore[return-value]


def _shipped() -> str:
    names = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    return f"; configs that come with vla_rl: {', '.join(names)}" if names else ""


Model = TypeVar("Model", bound=BaseModel)


def load_model(path: Path, kind: type[Model], what: str) -> Model:
    """Read a YAML file as a ``kind``. Raises UserError with all mistakes; ``what`` names the kind for the message."""
    try:
        return kind.model_validate(yaml.safe_load(read_text(path)))
    except ValidationError as error:
        problems = "".join(f"\n  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise UserError(f"{path} is not {what}:{problems}") from None
    except (OSError, yaml.YAMLError, *UNREADABLE) as error:
        raise UserError(f"{path} cannot be read as {what}: {str(error)[:300]}") from None
