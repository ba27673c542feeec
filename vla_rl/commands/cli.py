"""The command line `vla-rl`. A command is imported when it runs, so that help and mistakes are answered at once."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from vla_rl.commands.benchmark_table import BENCHMARKS
from vla_rl.commands.command_table import COMMANDS, Command
from vla_rl.commands.output import lasting_output
from vla_rl.core.errors import RunError, UserError

EXIT_RUN_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_RAY_NEED_NOT_SAY = "PYTHON worker processes have been started"  # many env workers are intended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.

    0: done. 1: a run cannot go on, or the command found something missing (``doctor``). 2: a mistake that the user can
    fix. 130: interrupted. Unexpected errors keep their traceback, with which Python exits with status 1.
    """
    args = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _RAY_NEED_NOT_SAY)  # read by the first import of Ray
    with lasting_output() as output:
        status = _run(args)
    if output.error is not None:
        print(f"vla-rl {args.command}: error: standard output cannot be written: {output.error}", file=sys.stderr)
        return status if args.command == "train" else status or EXIT_USER_ERROR  # a run's results are in its folder
    return status


def _run(args: argparse.Namespace) -> int:
    try:
        module, _, function = args.handler.partition(":")
        status: int = getattr(import_module(f"vla_rl.commands.{module}"), function)(args)
        return status
    except (UserError, RunError) as error:
        print(f"vla-rl {args.command}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_ERROR
    except KeyboardInterrupt:
        print(f"vla-rl {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="vla-rl",
        description="Asynchronous actor-learner reinforcement learning of vision-language-action policies.",
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        _add(commands, name, command)
    benchmark = commands.add_parser("benchmark", help="measure the runtime, or a simulator compared with its peers")
    kinds = benchmark.add_subparsers(title="benchmarks", dest="what", metavar="WHAT", required=True)
    for name, command in BENCHMARKS.items():
        _add(kinds, name, command)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    misplaced = [text for text in rest if text.startswith("-") or "overrides" not in args]
    if misplaced:
        parser.error(f"unrecognized arguments: {' '.join(misplaced)}")
    if rest:  # argparse leaves over what follows an option that is between positionals
        args.overrides = [*args.overrides, *rest]
    return args


def _add(commands: Any, name: str, command: Command) -> None:
    handler, summary, arguments = command
    end = "" if summary.endswith("?") else "."
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}{end}")
    parser.set_defaults(handler=handler)
    for names, options in arguments:
        parser.add_argument(*names, **options)


if __name__ == "__main__":
    sys.exit(main())
