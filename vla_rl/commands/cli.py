"""The command ``vla-rl``. A command imports what it needs when it runs: help and mistakes are answered at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vla_rl.core.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_RAY_NEED_NOT_SAY = "PYTHON worker processes have been started"  # a run with many env workers is meant to have them


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.

    0: done. 1: the command found something missing (``doctor``). 2: something the user can mend, named in one message.
    130: interrupted. Unexpected errors keep their traceback, with which Python exits with status 1.
    """
    args = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _RAY_NEED_NOT_SAY)  # read by the first import of Ray
    try:
        handler = args.handler
        if isinstance(handler, str):  # "module:function", imported only now
            module, _, function = handler.partition(":")
            handler = getattr(import_module(module), function)
        return handler(args)
    except UserError as error:
        print(f"vla-rl {args.command}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"vla-rl {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vla-rl",
        description="Asynchronous actor-learner reinforcement learning of vision-language-action policies.",
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for add in (
        _add_train,
        _add_eval,
        _add_sft,
        _add_plot,
        _add_study,
        _add_plan,
        _add_profile,
        _add_config,
        _add_benchmark,
        _add_doctor,
    ):
        add(commands)
    args, rest = parser.parse_known_args(argv)
    misplaced = [text for text in rest if text.startswith("-") or "overrides" not in args]
    if misplaced:
        parser.error(f"unrecognized arguments: {' '.join(misplaced)}")
    if rest:  # argparse leaves over what follows an option that stands between positionals
        args.overrides = [*args.overrides, *rest]
    return args


def _add_train(commands: Any) -> None:
    parser = _add_command(commands, "train", _train, "train a policy by reinforcement learning")
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file, such as configs/libero_ppo.yaml")
    _add_overrides(parser)
    parser.add_argument("--resume", metavar="RUN", type=Path, help="continue the run in this folder, with its config")
    _add_json(parser)


def _add_eval(commands: Any) -> None:
    parser = _add_command(commands, "eval", _eval, "measure a policy's success rate")
    parser.add_argument("target", metavar="RUN_OR_CHECKPOINT", type=Path, help="folder of a run or of a checkpoint")
    _add_overrides(parser)
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file; by default the run's own config")
    parser.add_argument("--suite", metavar="NAME", help="LIBERO suite, all its tasks; as env.suite=NAME env.tasks=[]")
    parser.add_argument("--tasks", metavar="N,N,...", help="task numbers within the suite; as env.tasks=[N,N,...]")
    parser.add_argument("--episodes", metavar="N", type=_positive, help="how many episodes, over all tasks together")
    parser.add_argument(
        "--video", metavar="FILE", type=_new_file, help="save a video of the first episodes, an mp4 file"
    )
    parser.add_argument("--sampled", action="store_true", help="sample actions instead of taking the most likely ones")
    _add_json(parser)


def _add_sft(commands: Any) -> None:
    parser = _add_command(
        commands,
        "sft",
        "vla_rl.commands.sft:sft_command",
        "warm-start a policy from demonstrations, by behaviour cloning",
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file")
    _add_overrides(parser)
    _add_json(parser)


def _add_plot(commands: Any) -> None:
    parser = _add_command(
        commands, "plot", "vla_rl.commands.plot:plot_command", "draw the curves of one run, or compare several"
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or a copy of its metrics.jsonl")
    parser.add_argument("--output", metavar="FILE", type=_new_file, default=Path("curves.png"), help="the picture")


def _add_study(commands: Any) -> None:
    parser = _add_command(
        commands,
        "study",
        "vla_rl.commands.study:study_command",
        "train several variants with several seeds, and compare them",
    )
    parser.add_argument("study", metavar="STUDY", type=Path, help="YAML file, such as configs/studies/staleness.yaml")
    parser.add_argument("--runs", metavar="FOLDER", type=Path, default=Path("runs"), help="where its runs are kept")
    parser.add_argument("--jobs", metavar="N", type=_positive, default=1, help="runs at a time")
    parser.add_argument("--output", metavar="FILE", type=_new_file, help="draw a picture, a png file")
    _add_json(parser)


def _add_plan(commands: Any) -> None:
    parser = _add_command(commands, "plan", "vla_rl.commands.plan:plan_command", "show what would run where, and why")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file")
    _add_overrides(parser)
    parser.add_argument("--output", metavar="FILE", type=_new_file, help="draw devices over time, a png file")
    _add_json(parser)


def _add_profile(commands: Any) -> None:
    parser = _add_command(
        commands,
        "profile",
        "vla_rl.commands.profile:profile_command",
        "measure what simulator, inference and learner cost here",
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="YAML file")
    _add_overrides(parser)
    parser.add_argument("--output", metavar="FILE", type=_new_file, default=Path("profile.yaml"), help="the profile")


def _add_benchmark(commands: Any) -> None:
    parser = _add_command(commands, "benchmark", None, "measure the runtime, or a simulator beside its peers")
    kinds = parser.add_subparsers(title="benchmarks", dest="what", metavar="WHAT", required=True)
    overlap = _add_command(
        kinds,
        "overlap",
        "vla_rl.commands.benchmark.overlap:overlap_command",
        "do simulator, inference and learner run at once?",
    )
    overlap.add_argument("--iterations", metavar="N", type=_positive, default=6, help="measured per case and mode")
    simulator = _add_command(
        kinds,
        "simulator",
        "vla_rl.commands.benchmark.simulator:simulator_command",
        "LIBERO on one core, beside hf-libero and lerobot",
    )
    simulator.add_argument("name", choices=["libero"])
    simulator.add_argument("--suite", metavar="NAME", default="libero_spatial", help="its first two tasks are played")
    simulator.add_argument("--image-size", metavar="N", type=_positive, default=256, help="pixels")
    simulator.add_argument("--chunk-size", metavar="N", type=_positive, default=8, help="control steps")
    simulator.add_argument("--rounds", metavar="N", type=_positive, default=5, help="turns of each contestant")
    scaling = _add_command(
        kinds,
        "scaling",
        "vla_rl.commands.benchmark.scaling:scaling_command",
        "batches/s across device counts and placement modes",
    )
    scaling.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, such as configs/scaling/libero.yaml")
    _add_overrides(scaling)
    scaling.add_argument(
        "--backend", choices=["real", "virtual", "simulated"], help="by default as the config says (placement.virtual)"
    )
    scaling.add_argument("--devices", metavar="N,N,...", type=_numbers, default=[1, 2, 4, 8], help="device counts")
    scaling.add_argument(
        "--mode", metavar="NAME,...", default="all", help="placement modes; all: with auto, and the reference"
    )
    scaling.add_argument("--iterations", metavar="N", type=_positive, default=4, help="measured per point")
    scaling.add_argument("--csv", metavar="FILE", type=_new_file, help="also write the points to this file")
    scaling.add_argument("--output", metavar="FILE", type=_new_file, help="draw a picture, a png file")
    for kind in (overlap, simulator):
        _add_json(kind)
    _add_json(scaling, "also write the points to this file; those that it holds already are not measured again")


def _add_config(commands: Any) -> None:
    summary = "print all config keys, as a reference page or as a JSON Schema for editors"
    parser = _add_command(commands, "config", "vla_rl.commands.config:config_command", summary)
    parser.add_argument("what", choices=["docs", "schema"], help="docs: Markdown, docs/configuration.md; schema: JSON")


def _add_doctor(commands: Any) -> None:
    parser = _add_command(
        commands,
        "doctor",
        "vla_rl.commands.doctor:doctor_command",
        "say what this machine has, what it lacks and how to mend that",
    )
    _add_json(parser)


def _add_command(
    commands: Any, name: str, handler: Callable[[argparse.Namespace], int] | str | None, summary: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(handler=handler)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="any key of the config, such as train.iterations=2, env.tasks=[0,1] or algo=NAME",
    )


def _add_json(parser: argparse.ArgumentParser, use: str = "also write the figures to this file") -> None:
    parser.add_argument("--json", metavar="FILE", type=_new_file, help=use)


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file in a folder that exists")
    return path


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _train(args: argparse.Namespace) -> int:
    from vla_rl.placement.checks import load_checked_config

    file, overrides = args.config, args.overrides
    if file is not None and "=" in file and not Path(file).exists():
        file, overrides = None, [file, *overrides]
    if args.resume is not None:
        if file is not None:
            raise UserError(f"a resumed run has its own config: leave out {file}, or leave out --resume {args.resume}")
        file = args.resume / "config.yaml"
        if not file.is_file():
            raise UserError(f"--resume {args.resume}: no run folder, {file} does not exist; name a folder below runs/")
    elif file is None:
        raise UserError("no config given: name one, such as `vla-rl train configs/libero_ppo.yaml`")
    config = load_checked_config(Path(file), overrides)
    iterations = config.train.iterations
    print(f"{file}: {config.algo.name} on {config.env.name}, {iterations} iterations; loading libraries", flush=True)

    from vla_rl.commands.train import train

    return train(config, args.resume, args.json)


def _eval(args: argparse.Namespace) -> int:
    from vla_rl.commands.evaluate import evaluate_command

    given = []
    if args.suite is not None:
        given += [f"env.suite={args.suite}", "env.tasks=[]"]
    if args.tasks is not None:
        given += [f"env.tasks=[{args.tasks}]"]
    args.overrides = [*given, *args.overrides]
    return evaluate_command(args)


if __name__ == "__main__":
    sys.exit(main())
