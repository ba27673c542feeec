"""What the site (mkdocs.yml) needs beside Markdown: pages made from the source, and links that leave docs/."""

import ast
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REFERENCE, ERRORS = "reference.md", "errors.md"
_INTRODUCTION = """# API by docstrings

What `vla_rl` exports, then what parts of your own are made from. [The guide](api.md) shows how they are used.
"""
PARTS = (  # of a policy, an environment and an algorithm; the tutorials say which methods are needed
    *("vla_rl.policies.base.policy.Policy", "envs.base.vector_env.VectorEnv", "vla_rl.core.records.EnvSpec"),
    *("algos.algorithm.Algorithm", "algos.off_policy.OffPolicyAlgorithm", "vla_rl.core.records.SuperBatch"),
)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the page of docstrings and that of error messages.

    The first is no file in docs/, where a reader without the site would see only its names; the second serves a search.
    """
    from mkdocs.structure.files import File

    sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone
    from error_messages import errors_page

    for name, content in ((REFERENCE, reference_page()), (ERRORS, errors_page())):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leaves the text of links to files outside docs/: they belong to the checkout, not to the site."""
    folder = PurePosixPath(page.file.src_uri).parent
    return _LINK.sub(lambda link: link[1] if leaves_docs(folder, link[2]) else link[0], markdown)


def leaves_docs(folder: PurePosixPath, target: str) -> bool:
    """Whether a link on a page in ``folder`` (relative to docs/) leads to a file outside docs/."""
    depth = len(folder.parts)
    for part in PurePosixPath(target).parts if "://" not in target else ():
        depth += {"..": -1, ".": 0}.get(part, 1)
        if depth < 0:
            return True
    return False


def reference_page() -> str:
    """Markdown with a directive for each name; mkdocstrings fills in the docstrings."""
    homes = exported()
    lines = [_INTRODUCTION, "## Functions and classes of `vla_rl`\n"]
    lines += [f"::: {homes[name]}.{name}\n" for name in sorted(homes, key=lambda name: (name[0].isupper(), name))]
    return "\n".join([*lines, "## For parts of your own\n", *(f"::: {name}\n" for name in PARTS)])


def exported() -> dict[str, str]:
    """The public names of ``vla_rl`` and their modules, as its ``__init__`` declares them for type checkers."""
    tree = ast.parse((ROOT / "vla_rl/__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    found = {alias.name: str(node.module) for node in imports for alias in node.names}
    (names,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and _is_all(node))
    return {name: found[name] for name in ast.literal_eval(names)}


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
