"""Parts that other packages bring: simulators, policies and algorithms.

A configuration selects one by its name in an entry-point group (``GROUPS``) of an installed package, or as
``module:Class``. The class has its configuration keys in ``Config``; what else it needs, ``envs.base.VectorEnv``,
``vla_rl.policies.base.gaussian`` and ``algos.algorithm`` say. A part is imported when it is selected, not before.

Every process finds a part again by its name, so the class must be at the top of a module that can be imported; where
the first process found the module travels with the configuration.
"""

import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Literal

from pydantic import create_model

from vla_rl.core.errors import UserError
from vla_rl.core.schema import ConfigGroup

# groups of the configuration, and the entry-point groups that extend them
GROUPS: Mapping[str, str] = {"env": "vla_rl.envs", "policy": "vla_rl.policies", "algo": "vla_rl.algos"}
# ``module:Class``, or gymnasium's ``MODULE:ID``
_IMPORTS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class PluginError(UserError):
    """A part cannot be used. The text names the module or package, what is wrong and the remedy."""


class ImportingConfig(ConfigGroup):
    """Base of configurations that name modules: each is pickled with the folders where this process finds modules."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (getattr(self, "plugin", type(self)), _search_path(), self.__getstate__())


class PluginConfig(ImportingConfig):
    """Base of the configurations of parts from outside: knows the part, and is pickled by the part's name."""

    plugin: ClassVar[tuple[str, str]]  # group of the configuration, name


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """The parts that installed packages offer for a group of the configuration, by name."""
    return {found.name: found for found in sorted(entry_points(group=GROUPS[group]), key=lambda point: point.name)}


def is_reference(name: str) -> bool:
    """Whether ``name`` has the form ``module:Class``."""
    return _REFERENCE.fullmatch(name) is not None


def imports_code(value: object) -> bool:
    """Whether a configuration's value names a module, which is imported when the value is used."""
    return isinstance(value, str) and _IMPORTS.fullmatch(value) is not None


def reference_to(part: type) -> str:
    """``module:Class``. Raises PluginError for a class that other processes cannot find by that name."""
    if part.__module__ == "__main__" or "<locals>" in part.__qualname__:
        raise PluginError(
            f"{part.__qualname__} is defined in a notebook, in the script itself or in a function, where a run's "
            "processes cannot import it; move it to the top of a module (a file) of its own"
        )
    return f"{part.__module__}:{part.__qualname__}"


@cache
def load_plugin(group: str, name: str) -> Any:
    """The class that ``name`` stands for in a group of the configuration. Raises PluginError."""
    point = installed(group).get(name)
    text = point.value if point is not None else name
    origin = f"{name} (of the package {point.dist.name})" if point is not None and point.dist is not None else name
    module_name, _, attribute = text.partition(":")
    if module_name == "__main__":
        raise PluginError(f"{name}: a run's processes cannot import __main__; move the class to a module of its own")
    try:
        found: Any = import_named(module_name)
    except ImportError as error:
        raise PluginError(
            f"{origin}: {module_name} cannot be imported ({error}); install its package, or start in the folder of "
            f"{module_name.partition('.')[0]}.py"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PluginError(f"{origin}: {module_name} has no {attribute}; write module:Class")
        found = getattr(found, part)
    return found


@cache
def plugin_config(group: str, name: str) -> type[ConfigGroup]:
    """The part's ``Config``, with the key ``name`` fixed to the name that selects it. Raises PluginError."""
    part = load_plugin(group, name)
    config = getattr(part, "Config", None)
    if not (isinstance(config, type) and issubclass(config, ConfigGroup)):
        raise PluginError(
            f"{name} has no Config: give the class its configuration keys, class Config({_CONFIG_BASES[group]})"
        )
    make: Any = create_model
    made: type[ConfigGroup] = make(
        re.sub(r"\W", "_", name),
        __base__=(PluginConfig, config),
        __doc__=config.__doc__ or part.__doc__,
        name=(Literal[name], name),
    )
    made.plugin = (group, name)  # type: ignore[attr-defined]
    return made


def plugin_of(config: ConfigGroup) -> Any:
    """The class of the part that ``config`` configures; None for a part of this project."""
    return load_plugin(*config.plugin) if isinstance(config, PluginConfig) else None


_CONFIG_BASES = {
    "env": "envs.base.config.SimulatorConfig",
    "policy": "vla_rl.policies.base.config.PolicyConfigBase",
    "algo": "PPO.Config",
}


def import_named(module: str) -> Any:
    """Import a module that a configuration names. The working folder is searched last: it hides no installed one."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return import_module(module)


def _search_path() -> tuple[str, ...]:
    """Folders where this process finds modules, without those of the interpreter, which all processes have."""
    own = (sys.prefix, sys.base_prefix)
    return tuple(os.path.abspath(path) for path in sys.path if not path.startswith(own))


def _restored(found: type | tuple[str, str], search_path: tuple[str, ...], state: dict[str, Any]) -> Any:
    sys.path.extend(path for path in search_path if path not in sys.path)
    kind: Any = plugin_config(*found) if isinstance(found, tuple) else found
    config = kind.__new__(kind)
    config.__setstate__(state)
    return config
