"""The reference page of all commands, docs/commands.md, from their argument parsers."""

import argparse
from collections.abc import Iterator

_INTRODUCTION = """# Commands

All commands and their arguments. `vla-rl config commands` prints this page from the argument parsers.
`vla-rl COMMAND --help` shows one of them. `KEY=VALUE` overrides a key of the config
([configuration.md](configuration.md)).

| Exit status | Meaning |
|---|---|
| 0 | done |
| 1 | a run cannot go on, or the command has found something wrong |
| 2 | a mistake that you can fix; the message has the remedy |
| 130 | interrupted |
"""


def commands_docs() -> str:
    """Markdown: a section for each command, with its usage and a table of its arguments."""
    from vla_rl.commands.cli import make_parser  # which names the command that calls this

    parts = [_INTRODUCTION]
    for parser, summary in _commands(make_parser()):
        end = "" if summary.endswith("?") else "."
        parts += [f"## {parser.prog}\n", f"{summary[0].upper()}{summary[1:]}{end}\n", *_usage(parser), *_table(parser)]
    return "\n".join(parts).rstrip()


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """The parsers of all commands with their summaries; of a command that has some of its own, those."""
    for group in parser._actions:
        if isinstance(group, argparse._SubParsersAction):
            for choice in group._choices_actions:
                below = group.choices[choice.dest]
                own = [*_commands(below)]
                yield from own or [(below, str(choice.help))]


def _usage(parser: argparse.ArgumentParser) -> list[str]:
    """The command as it is typed, one word for all options that need not be there."""
    options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    words = [_typed(action) for action in options if action.required]
    words += [_typed(action) for action in parser._actions if not action.option_strings]
    if any(not action.required for action in options):
        words.append("[OPTIONS]")
    return ["```", " ".join([parser.prog, *words]), "```", ""]


def _typed(action: argparse.Action) -> str:
    """An argument in the line of usage."""
    if action.option_strings:
        return f"{action.option_strings[-1]} {_value(action)}".strip()
    value = _value(action)
    return {"*": f"[{value} ...]", "+": f"{value} [{value} ...]", "?": f"[{value}]"}.get(str(action.nargs), value)


def _value(action: argparse.Action) -> str:
    """What stands for the value of an argument; empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.metavar is not None:
        return str(action.metavar)
    choices = [str(choice) for choice in action.choices or [action.dest.upper()]]
    return choices[0] if len(choices) == 1 else f"{{{','.join(choices)}}}"


def _table(parser: argparse.ArgumentParser) -> list[str]:
    actions = [action for action in parser._actions if action.dest != "help"]
    if not actions:
        return []
    rows = [f"| `{_name(action)}` | {_meaning(action)} |" for action in actions]
    return ["| Argument | Meaning |", "|---|---|", *rows, ""]


def _name(action: argparse.Action) -> str:
    return f"{', '.join(action.option_strings)} {_value(action)}".strip()


def _meaning(action: argparse.Action) -> str:
    """The help of an argument, with the default where it does not name one itself."""
    text = (action.help or "").replace("|", "\\|")
    named = not action.option_strings or action.default in (None, False) or "default" in text
    return text if named else f"{text} (default: {_default(action.default)})".lstrip()


def _default(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
