"""The page of error messages, read from the source, so that a search on the site finds what a terminal has printed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "vla_rl", "envs", "algos"
_INTRODUCTION = """# Error messages

What `vla_rl` prints when it refuses something. Each message names the value, the place and the remedy. `…` stands for
what the program fills in. Search for a part that no value can change. A heading is the file that has the message.
"""
# What reaches a person as one line: bad input, parts that do not fit, runs that cannot go on.
_SHOWN = re.compile(r"(User|Config|Checkpoint|Demonstration|Env|Plan|Plugin|Run)Error$|Problem$")


def errors_page() -> str:
    """Markdown: a section for each file with messages."""
    lines = [_INTRODUCTION]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if found := list(dict.fromkeys(messages(path.read_text()))):
                lines += [f"## {path.relative_to(ROOT).as_posix()}\n", *(f"* {text}" for text in found), ""]
    return "\n".join(lines)


def messages(source: str) -> Iterator[str]:
    """The texts of all errors that a file makes, as Markdown. Those put together elsewhere are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _SHOWN.search(node.func.id):
            texts = (text for argument in node.args if (text := _template(argument)))
            longest = max(texts, key=len, default="")
            if len(longest.replace("…", "").split()) > 2:
                yield re.sub(r"([<>*_`\\[\]|])", r"\\\1", " ".join(longest.split()))


def _template(node: ast.expr) -> str:
    """The text of a string literal or of an f-string, or of a sum or choice of them; "" of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.IfExp):  # one of the two stands for both
        return max(_template(node.body), _template(node.orelse), key=len)
    return ""
