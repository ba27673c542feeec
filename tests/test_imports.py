"""Dependencies point one way. A room is a folder; what follows is all that this test knows of the layout."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from tests import ROOT
from vla_rl.policies import PolicyConfig

PACKAGES = ("vla_rl", "envs", "algos")
SIMULATORS = {"gymnasium", "libero", "mani_skill", "metaworld", "mujoco", "robosuite", "sapien"}

# From the ground up: a room may import rooms on lower floors, and itself.
FLOORS = (
    {"vla_rl/core"},
    {"algos", "envs", "vla_rl/policies", "vla_rl/observability"},
    {"vla_rl/config"},
    {"vla_rl/rollout", "vla_rl/inference", "vla_rl/replay", "vla_rl/world_model", "vla_rl/placement"},
    {"vla_rl/learner"},
    {"vla_rl/cluster"},
    {"vla_rl/commands"},
    {"vla_rl"},  # the names that ``import vla_rl`` offers
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

CONFIGS = {config.__name__: config for config in get_args(get_args(PolicyConfig)[0])}
POLICIES = {config.model_fields["name"].default for config in CONFIGS.values()}
POLICY_MODULE = re.compile(rf"vla_rl\.policies\.({'|'.join(POLICIES)})\b")
POLICY_NAME = re.compile(rf"(policy(\.name)?=)({'|'.join(POLICIES)})|{'|'.join(POLICIES - {'lerobot'})}")  # a package
NAMES_A_POLICY = {  # outside of vla_rl/policies
    "vla_rl.config.run_config": "the default of the key policy",
    "vla_rl.commands.benchmark.overlap": "measures the runtime with one small policy",
}


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name, with its file relative to the repository."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT)
            parts = file.with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((ROOT / modules()[module]).read_text())


def names(node: ast.AST) -> Iterator[str]:
    """Modules that one statement imports, also by ``import_module`` with a literal name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            yield submodule if submodule in modules() else node.module or ""
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


@cache
def imports(module: str) -> frozenset[str]:
    """Everything that a module imports, wherever in it."""
    return frozenset(name for node in ast.walk(tree(module)) for name in names(node))


@cache
def imports_on_load(module: str) -> frozenset[str]:
    """What is imported as soon as the module is."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        yield from names(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return frozenset(visit(tree(module)))


def own(module: str) -> set[str]:
    """The project's modules that a module imports, itself apart."""
    return {name for name in imports(module) if name.split(".")[0] in PACKAGES} - {module}


def libraries(found: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in found}


def folder(module: str) -> str:
    return modules()[module].parent.as_posix()


def room(module: str) -> str:
    """``envs``, ``algos``, or a folder directly below ``vla_rl``."""
    parts = modules()[module].parts[:-1]
    return "/".join(parts[:2]) if parts[0] == "vla_rl" else parts[0]


def circles(edges: dict[str, set[str]]) -> set[str]:
    """Nodes that reach themselves, or lie between two that do."""
    while leaves := {node for node in edges if not edges[node]}:
        edges = {node: needed - leaves for node, needed in edges.items() if node not in leaves}
    return set(edges)


def test_a_folder_listing_fits_on_a_page():
    entries = {path.name for path in (ROOT / "vla_rl").iterdir()} - {"__pycache__", "py.typed"}
    assert len(entries) <= 13
    assert {room(module) for module in modules()} == set(FLOOR)


@pytest.mark.parametrize("module", modules())
def test_a_module_knows_only_rooms_below_its_own(module: str):
    here = room(module)
    above = {name for name in own(module) if room(name) != here and FLOOR[room(name)] >= FLOOR[here]}
    assert not above, f"{module} ({here}) imports {sorted(above)}"


@pytest.mark.parametrize("module", modules())
def test_imports_are_absolute_and_of_modules_that_exist(module: str):
    relative = [node.lineno for node in ast.walk(tree(module)) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, f"{module} imports relatively on lines {relative}"
    assert own(module) <= modules().keys()


def test_no_files_import_each_other_in_a_circle():
    """Lazy imports and imports for type checkers count as well."""
    assert not circles({module: own(module) for module in modules()})


def test_no_folders_import_each_other_in_a_circle():
    """Every folder is one node, a folder inside another included."""
    edges: dict[str, set[str]] = {folder(module): set() for module in modules()}
    for module in modules():
        edges[folder(module)] |= {folder(name) for name in own(module)} - {folder(module)}
    assert not circles(edges)


def test_only_the_cluster_knows_ray():
    assert {room(module) for module in modules() if "ray" in libraries(imports(module))} == {"vla_rl/cluster"}


def test_only_simulators_know_their_libraries():
    assert {room(module) for module in modules() if libraries(imports(module)) & SIMULATORS} == {"envs"}


def test_simulators_configuration_and_placement_do_not_load_torch():
    light = {"envs", "vla_rl/config", "vla_rl/placement", "vla_rl/observability"}
    assert not {m for m in modules() if room(m) in light and "torch" in libraries(imports_on_load(m))}


def named_policies(module: str) -> Iterator[str]:
    """Where a module depends on which policy there is: imports, classes of configs, names, comparisons of names."""
    yield from filter(POLICY_MODULE.match, imports(module))
    for node in ast.walk(tree(module)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in CONFIGS:
                yield name
            case ast.Constant(value=str(text)) if POLICY_NAME.fullmatch(text):
                yield text
            case ast.Compare() | ast.Match():
                compared = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
                yield from (text for text in map(ast.unparse, compared) if text.endswith("policy.name"))


def test_only_policies_know_which_ones_there_are():
    found = {module: set(named_policies(module)) for module in modules() if room(module) != "vla_rl/policies"}
    assert {module for module, reasons in found.items() if reasons} == NAMES_A_POLICY.keys(), found


def test_every_folder_of_a_policy_is_in_the_union_of_configs():
    """A policy's name is that of its folder (``vla_rl.policies.build``)."""
    inside = (file.parts for file in modules().values() if file.is_relative_to("vla_rl/policies"))
    folders = {parts[2] for parts in inside if len(parts) > 3}
    expected = {f"vla_rl.policies.{name}.config": name for name in folders - {"base"}}
    assert {config.__module__: config.model_fields["name"].default for config in CONFIGS.values()} == expected
    assert len(CONFIGS) == len(expected)
