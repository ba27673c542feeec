"""Dependencies point one way (docs: which room may know of which other)."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("vla_rl", "envs", "algos")
BASE = {"vla_rl", "vla_rl.core.records", "vla_rl.core.schema", "vla_rl.core.errors"}
CONFIG = {"vla_rl.config.run_config"}
APPLICATIONS = {"vla_rl.commands.train", "vla_rl.commands.evaluate", "vla_rl.commands.sft"}
CLUSTER = {
    "vla_rl.cluster.cluster",
    "vla_rl.cluster.ray_session",
    "vla_rl.cluster.processes",
    "vla_rl.cluster.virtual_processes",
}
SIMULATORS = {"gymnasium", "libero", "mani_skill", "mujoco", "robosuite", "sapien"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


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


def own(found: frozenset[str]) -> set[str]:
    return {name for name in found if name.split(".")[0] in PACKAGES}


def roots(found: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in found}


def room(module: str) -> str:
    if module in BASE:
        return "base"
    if module in CONFIG:
        return "config"
    if module.split(".")[0] in ("envs", "algos"):
        return module.split(".")[0]
    if module == "vla_rl.policies" or module.startswith("vla_rl.policies."):
        return "policies"
    if module in APPLICATIONS or module.startswith("vla_rl.commands.benchmark"):
        return "application"
    if module in CLUSTER:
        return "cluster"
    return "cli" if module == "vla_rl.commands.cli" else "component"


MAY_KNOW = {
    "base": {"base"},
    "algos": {"base", "algos"},  # an algorithm's file holds its keys
    "config": {"base", "algos", "config"},
    "envs": {"base", "config", "envs"},
    "policies": {"base", "config", "policies"},
    "component": {"base", "config", "envs", "algos", "policies", "component"},
    "cluster": {"base", "config", "envs", "algos", "policies", "component", "cluster"},
    "application": {"base", "config", "envs", "algos", "policies", "component", "cluster", "application"},
    "cli": {"base", "config", "component", "application"},
}


def test_the_rooms_are_found():
    assert {room(module) for module in modules()} == set(MAY_KNOW)
    assert modules().keys() >= BASE | APPLICATIONS
    assert own(imports("vla_rl.rollout.env_worker")) >= {"vla_rl.core.records", "vla_rl.core.ipc.mailbox"}


@pytest.mark.parametrize("module", modules())
def test_a_module_knows_only_rooms_below_its_own(module: str):
    above = {name for name in own(imports(module)) if room(name) not in MAY_KNOW[room(module)]}
    assert not above, f"{module} ({room(module)}) imports {sorted(above)}"


@pytest.mark.parametrize("module", modules())
def test_imports_are_absolute_and_of_modules_that_exist(module: str):
    relative = [node.lineno for node in ast.walk(tree(module)) if isinstance(node, ast.ImportFrom) and node.level]
    assert not relative, f"{module} imports relatively on lines {relative}"
    assert own(imports(module)) <= modules().keys()


def test_only_the_cluster_knows_ray():
    knowing = [module for module in modules() if "ray" in roots(imports(module))]
    assert knowing == ["vla_rl.cluster.cluster", "vla_rl.cluster.ray_session", "vla_rl.cluster.processes"]


def test_only_simulator_rooms_know_simulators():
    assert not {module for module in modules() if roots(imports(module)) & SIMULATORS and room(module) != "envs"}


def test_simulators_do_not_load_torch():
    assert not {module for module in modules() if room(module) == "envs" and "torch" in roots(imports_on_load(module))}


def test_the_planner_is_pure():
    assert own(imports("vla_rl.placement.plan")) <= BASE | CONFIG | {"vla_rl.core.machine"}
    assert "torch" not in roots(imports("vla_rl.placement.plan"))


def test_no_module_needs_itself_to_load():
    edges = {module: own(imports_on_load(module)) & modules().keys() - {module} for module in modules()}
    while leaves := {module for module in edges if not edges[module]}:
        edges = {module: needed - leaves for module, needed in edges.items() if module not in leaves}
    assert not edges, f"these modules import each other in a circle: {sorted(edges)}"
