"""The command line `vla-rl`. A command is imported when it runs, so that help and mistakes are answered at once."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vla_rl.commands.output import lasting_output
from vla_rl.core.errors import RunError, UserError

EXIT_RUN_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_RAY_NEED_NOT_SAY = "PYTHON worker processes have been started"  # many env workers are intended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status.

    0: done. 1: a run cannot go on, or the command found something missing (``doctor``). 2: a mistake that the user can
    fix.
    130: interrupted. Unexpected errors keep their traceback, with which Python exits with status 1.
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
        handler = args.handler
        if isinstance(handler, str):  # "module:function", imported only now
            module, _, function = handler.partition(":")
            handler = getattr(import_module(f"vla_rl.commands.{module}"), function)
        return handler(args)
    except (UserError, RunError) as error:
        print(f"vla-rl {args.command}: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_RUN_ERROR
    except KeyboardInterrupt:
        print(f"vla-rl {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name a file in a folder that exists")
    return path


def _resumed(text: str) -> tuple[Path, int | None]:
    """``RUN`` or ``RUN@ITERATION``."""
    run, at, iteration = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    if not iteration.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: {iteration!r} is not an iteration; write RUN@ITERATION")
    return Path(run), int(iteration)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number below 1000000000")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below a million")
    return value


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def _train(args: argparse.Namespace) -> int:
    from vla_rl.observability.heartbeat import announcing
    from vla_rl.placement.checks import load_checked_config

    file, overrides, (resume, iteration) = args.config, args.overrides, args.resume or (None, None)
    if file is not None and "=" in file and not Path(file).exists():
        file, overrides = None, [file, *overrides]
    if resume is not None:
        if file is not None:
            raise UserError(f"a resumed run has its own config: leave out {file}, or leave out --resume {resume}")
        file = resume / "config.yaml"
        if not file.is_file():
            raise UserError(f"--resume {resume}: no run folder, {file} does not exist; name a folder below runs/")
    elif file is None:
        raise UserError("no config given: name one, such as `vla-rl train libero_ppo`")
    config = load_checked_config(Path(file), overrides)
    iterations = config.train.iterations
    print(f"{file}: {config.algo.name} on {config.env.name}, {iterations} iterations; loading libraries", flush=True)

    from vla_rl.cluster.fork_server import modules_of, start_fork_servers

    start_fork_servers(modules_of(config))  # they load theirs while this process does

    with announcing("loading libraries"):
        from vla_rl.commands.train import train

    return train(config, resume, args.json, iteration)


def _eval(args: argparse.Namespace) -> int:
    from vla_rl.observability.heartbeat import announcing

    with announcing("loading libraries"):
        from vla_rl.commands.evaluate import evaluate_command
        from vla_rl.commands.evaluate_suites import evaluate_suites_command
    if args.suite is not None:
        return evaluate_suites_command(args)

    if args.tasks is not None:
        args.overrides = [f"env.tasks=[{args.tasks}]", *args.overrides]
    return evaluate_command(args)


def _doctor(args: argparse.Namespace) -> int:
    if args.cluster is not None:
        from vla_rl.commands.doctor_cluster import doctor_cluster_command

        return doctor_cluster_command(args)
    from vla_rl.commands.doctor import doctor_command

    return doctor_command(args)


def _option(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of ``ArgumentParser.add_argument``."""
    return names, options


def _count(name: str, use: str, default: int | None = None) -> tuple[tuple[str, ...], dict[str, Any]]:
    return _option(name, metavar="N", type=_positive, default=default, help=use)


def _file(name: str, use: str, default: Path | None = None) -> tuple[tuple[str, ...], dict[str, Any]]:
    return _option(name, metavar="FILE", type=_new_file, default=default, help=use)


CONFIG_HELP = "YAML file, or the name of a shipped one, such as libero_ppo"
CONFIG = _option("config", metavar="CONFIG", type=Path, help=CONFIG_HELP)
OVERRIDES = _option(
    "overrides",
    metavar="KEY=VALUE",
    nargs="*",
    help="any key of the config, such as train.iterations=2, env.tasks=[0,1] or algo=NAME",
)
JSON = _file("--json", "also write the figures to this file")
PICTURE = _file("--output", "draw a picture, a png file")

FAULT_NAMES = (
    *("kill", "freeze", "delay", "exception", "nan_observation", "nan_loss", "full_disk", "full_shared_memory"),
    *("corrupt_checkpoint", "driver", "node", "tree"),
)

# name: (handler, summary, arguments); a handler is a function, or "module:function" below vla_rl.commands
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int] | str, str, tuple]] = {
    "train": (
        _train,
        "train a policy by reinforcement learning",
        (
            _option("config", metavar="CONFIG", nargs="?", help=CONFIG_HELP),
            OVERRIDES,
            _option(
                "--resume",
                metavar="RUN[@ITERATION]",
                type=_resumed,
                help="continue the run in this folder, with its config, from its newest checkpoint or from another one",
            ),
            JSON,
        ),
    ),
    "eval": (
        _eval,
        "measure a policy's success rate",
        (
            _option(
                "target",
                metavar="RUN_OR_CHECKPOINT",
                help="folder of a run or of a checkpoint, or hf://OWNER/NAME; or policy=remote, with "
                "policy.address=ws://HOST:PORT, for a policy server",
            ),
            OVERRIDES,
            _option("--config", metavar="FILE", type=Path, help="YAML file; by default the run's own config"),
            _option(
                "--best", action="store_true", help="of a run, the best checkpoint by its evaluations; else the newest"
            ),
            _option("--tasks", metavar="N,N,...", help="task numbers within the suite; as env.tasks=[N,N,...]"),
            _count("--episodes", "number of episodes, over all tasks together"),
            _file("--video", "save a film of the first three episodes, an mp4 file"),
            _count("--failures", "with --video: film N episodes, failures first; each is played again for that"),
            _option(
                "--suite",
                metavar="NAME,...",
                help="all, or names: play these benchmark suites, each task as often as the others; an interrupted "
                "command continues when it is repeated",
            ),
            _count("--per-task", "with --suite: episodes of each task", 50),
            _count("--max-tasks", "with --suite: this many tasks of each suite at most, evenly spread"),
            _option(
                "--videos",
                metavar="N",
                type=_whole,
                default=1,
                help="with --suite: episodes of each task to film, failures first",
            ),
            _option("--output", metavar="FOLDER", type=Path, help="with --suite: where the results are kept"),
            _option("--sampled", action="store_true", help="sample actions instead of taking the most likely ones"),
            JSON,
        ),
    ),
    "diagnose": (
        "diagnose:diagnose_command",
        "find the convention (images, actions, statistics, prompt) that keeps a policy from succeeding",
        (
            _option("target", metavar="CHECKPOINT", help="folder of a checkpoint or of a run, or hf://OWNER/NAME"),
            _option("config", metavar="CONFIG", nargs="?", help=f"{CONFIG_HELP}; by default the run's own"),
            OVERRIDES,
            _option("--demos", metavar="DATA", type=Path, help="demonstrations; by default the simulator's expert's"),
            _option(
                "--episodes", metavar="N", type=_whole, default=4, help="episodes to play with each setting; 0: none"
            ),
            JSON,
        ),
    ),
    "serve": (
        "serve:serve_command",
        "answer openpi's clients and vla-eval over the network, with a policy of a run or a checkpoint",
        (
            _option("target", metavar="CHECKPOINT", help="folder of a checkpoint or of a run, or hf://OWNER/NAME"),
            _option("config", metavar="CONFIG", nargs="?", help=f"{CONFIG_HELP}; by default the run's own"),
            OVERRIDES,
            _option("--host", metavar="ADDRESS", default="127.0.0.1", help="to listen at; others need a token"),
            _option("--port", metavar="N", type=_whole, default=8000, help="to listen at; 0: one that is free"),
            _option(
                "--token-file",
                metavar="FILE",
                type=Path,
                help="what clients have to know; by default VLA_RL_TOKEN of the environment",
            ),
            _count("--connections", "clients at a time", 16),
            _option("--sampled", action="store_true", help="sample actions instead of taking the most likely ones"),
        ),
    ),
    "sft": (
        "sft:sft_command",
        "warm-start a policy from demonstrations, by behaviour cloning",
        (CONFIG, OVERRIDES, JSON),
    ),
    "demos": (
        "inspect:demos_command",
        "compare demonstrations with a simulator: what they hold, and what looks wrong",
        (
            _option("action", choices=("inspect",), help="what to do with them"),
            _option("data", metavar="DATA", type=Path, help="HDF5 file, folder of such, or LeRobot data set"),
            CONFIG,
            OVERRIDES,
            _file("--output", "a picture of frames and histograms"),
            JSON,
        ),
    ),
    "export": (
        "export:export_command",
        "write a policy in a layout that other projects read, or in this project's",
        (
            _option("target", metavar="CHECKPOINT_OR_RUN", type=Path, help="folder of a checkpoint or of a run"),
            _option(
                "--format",
                metavar="NAME",
                required=True,
                help="native: this project's; others by policy (docs/policies.md), listed if the policy lacks NAME",
            ),
            _option("--output", metavar="FOLDER", type=Path, required=True, help="the new folder"),
            _option(
                "--source",
                metavar="FOLDER",
                help="published checkpoint that training began with; by default the run's policy.checkpoint",
            ),
            _option("--unnorm-key", metavar="NAME", help="data set whose statistics to read or to write"),
            _count("--chunk-size", "of a published checkpoint, whose files do not say it: actions per inference; 8"),
            _option(
                "--decoding",
                choices=["parallel", "autoregressive"],
                help="of a published checkpoint; by default as its files say",
            ),
            _count("--views", "of a published checkpoint: camera images per observation; 1"),
        ),
    ),
    "push": (
        "push:push_command",
        "publish a run's policy on the model hub, with a model card made from the run",
        (
            _option("run", metavar="RUN", type=Path, help="run folder"),
            _option("--repo", metavar="OWNER/NAME", help="the repository; it is created if it is missing"),
            _option("--best", action="store_true", help="the best checkpoint by its evaluations; else the newest"),
            _option(
                "--evaluation",
                metavar="FOLDER",
                type=Path,
                help="results of `vla-rl eval --suite`; by default those of this checkpoint in evaluations/, if any",
            ),
            _option("--private", action="store_true", help="create a private repository"),
            _option(
                "--license",
                metavar="ID",
                default="unknown",
                help="license of the weights, as the hub writes it, such as apache-2.0 (default: unknown, since it "
                "depends on what they were trained from)",
            ),
            _option("--dry-run", metavar="DIR", type=Path, help="write what would be pushed to this new folder"),
        ),
    ),
    "plot": (
        "plot:plot_command",
        "draw the curves of one run, or compare several",
        (
            _option("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or a copy of its metrics.jsonl"),
            _option(
                "--x",
                choices=("minutes", "steps", "episodes", "robot-hours"),
                default="minutes",
                help="what to draw over",
            ),
            _file("--output", "the picture", Path("curves.png")),
            _option(
                "--table",
                choices=("markdown", "latex"),
                help="instead, print runs as a table: success before and after, episodes, minutes",
            ),
            _file(
                "--animate",
                "instead, animate one run in this webp or gif file: films of its first and last evaluation, the curve",
            ),
            _count("--kilobytes", "with --animate: what the file may have; it has lower quality or fewer frames", 400),
        ),
    ),
    "watch": (
        "watch:watch_command",
        "show a run that is going on, or one that is over, from another terminal",
        (
            _option("run", metavar="RUN", type=Path, help="run folder"),
            _option("--once", action="store_true", help="show it once, and end"),
            _option("--follow", action="store_true", help="go on when the run ends: it may be resumed"),
        ),
    ),
    "report": (
        "report:report_command",
        "write what came out of one run, or of several, as a page of HTML that needs no network",
        (
            _option("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or a copy of its metrics.jsonl"),
            _file("--output", "the page; by default report.html, of one run in its folder, of several in this one"),
        ),
    ),
    "why": (
        "why:why_command",
        "say what is wrong with a run and what to do, from what it has recorded; exit status 1 if something is",
        (_option("run", metavar="RUN", type=Path, help="run folder, or a copy of its metrics.jsonl"), JSON),
    ),
    "trace": (
        "trace:trace_command",
        "write what each process of a run did when, for Perfetto and as a picture",
        (
            _option("run", metavar="RUN", type=Path, help="folder of a run with log.trace=true"),
            _file("--output", "the trace, a json file; compressed if its name ends in .gz", Path("trace.json")),
            _file("--picture", "also draw the end of the run, a png or svg file, below what its profile predicts"),
            _option("--seconds", metavar="S", type=_amount, default=20.0, help="with --picture: how long an end"),
        ),
    ),
    "world-model": (
        "world_model:world_model_command",
        "what a run's world model has learned, by its audit",
        (
            _option("run", metavar="RUN", type=Path, help="run folder, or a copy of its metrics.jsonl"),
            _file("--output", "the picture", Path("world_model.png")),
        ),
    ),
    "study": (
        "study:study_command",
        "train several variants with several seeds, and compare them",
        (
            _option("study", metavar="STUDY", type=Path, help="YAML file, such as configs/studies/staleness.yaml"),
            _option("--runs", metavar="FOLDER", type=Path, default=Path("runs"), help="where its runs are kept"),
            _count("--jobs", "runs at a time", 1),
            PICTURE,
            JSON,
        ),
    ),
    "chaos": (
        "chaos.command:chaos_command",
        "train while processes are killed, frozen and fed with nonsense, and report what each fault cost",
        (
            CONFIG,
            OVERRIDES,
            _option("--minutes", metavar="M", type=_amount, default=10.0, help="of training with faults"),
            _option(
                "--faults", metavar="KIND,...", default="all", help="all, none, or some of: " + ", ".join(FAULT_NAMES)
            ),
            _option("--every", metavar="SECONDS", type=_amount, default=20.0, help="mean pause before a fault"),
            _count("--count", "no more faults after so many; the run goes on alone"),
            _option("--seed", metavar="N", type=_whole, default=0, help="of the faults and their moments"),
            _option(
                "--undisturbed",
                metavar="RUN",
                type=Path,
                help="a run of this config and seed to compare with; by default one is trained afterwards",
            ),
        ),
    ),
    "audit": (
        "audit:audit_command",
        "compare where a simulator's objects come to rest with where they did when published numbers were made",
        (
            _option("simulator", choices=["libero"], help="the only one so far"),
            _option("--suite", metavar="NAME,...", default="all", help="of these suites; by default all"),
            _count("--states", "initial states of each task; by default all"),
            _file("--record", "also write the settled states to this file, npz"),
            JSON,
        ),
    ),
    "plan": (
        "plan:plan_command",
        "show what would run where, and why",
        (
            CONFIG,
            OVERRIDES,
            _option("--on", metavar="MACHINES", help="plan for these instead of this one, such as 8xH100+16x64cpu"),
            _file("--output", "draw devices over time, a png file"),
            JSON,
        ),
    ),
    "profile": (
        "profile:profile_command",
        "measure what simulator, inference and learner cost here",
        (CONFIG, OVERRIDES, _file("--output", "the profile", Path("profile.yaml"))),
    ),
    "config": (
        "config:config_command",
        "print all config keys, as a reference page or as a JSON Schema for editors, or the page of commands",
        (
            _option(
                "what",
                choices=["docs", "schema", "commands"],
                help="docs: Markdown, docs/configuration.md; schema: JSON; commands: Markdown, docs/commands.md",
            ),
        ),
    ),
    "list": ("parts:list_command", "list simulators, policies and algorithms, with those of other packages", (JSON,)),
    "doctor": (
        _doctor,
        "say what this machine, or each node of a Ray cluster, has and what it lacks, with the remedy",
        (
            _option(
                "--cluster",
                metavar="ADDRESS",
                help="HOST:PORT of a running Ray cluster to which this machine belongs, or auto: examine its nodes, "
                "and their links to its head",
            ),
            JSON,
        ),
    ),
    "join": (
        "join:join_command",
        "let this machine simulate for the runs of a Ray cluster (placement.env_hosts), until Ctrl-C",
        (
            _option("address", metavar="ADDRESS", help="HOST:PORT of the running Ray cluster"),
            _option("--node-ip-address", metavar="IP", help="of this machine, if the others reach it at this one only"),
        ),
    ),
}
BENCHMARKS: dict[str, tuple[str, str, tuple]] = {
    "overlap": (
        "benchmark.overlap:overlap_command",
        "do simulator, inference and learner run at once?",
        (_count("--iterations", "measured per case and mode", 6), JSON),
    ),
    "simulator": (
        "benchmark.simulator:simulator_command",
        "LIBERO on one core, compared with hf-libero and LeRobot",
        (
            _option("name", choices=["libero"], help="the only one so far"),
            _option("--suite", metavar="NAME", default="libero_spatial", help="its first two tasks are played"),
            _count("--image-size", "pixels", 256),
            _count("--chunk-size", "control steps", 8),
            _count("--rounds", "rounds that each contestant plays", 5),
            JSON,
        ),
    ),
    "limit": (
        "benchmark.limit:limit_command",
        "how near a run is to what no implementation avoids here",
        (CONFIG, OVERRIDES, _count("--iterations", "measured, after two that are not", 3), JSON),
    ),
    "regress": (
        "benchmark.regress:regress_command",
        "is this source tree slower than it was at a commit?",
        (
            _option("commit", metavar="COMMIT", help="of this checkout, such as HEAD~5"),
            _option("--figures", metavar="NAME,...", type=_names, help="chunk, observe, act, update, start; all"),
            _count("--blocks", "in which both are measured", 7),
            JSON,
        ),
    ),
    "workers": (
        "benchmark.workers:workers_command",
        "what the runtime itself costs for an episode, with many env workers, and what saturates first",
        (
            CONFIG,
            OVERRIDES,
            _option("--workers", metavar="N,N,...", type=_numbers, default=[1, 4, 16, 64], help="env workers"),
            _count("--iterations", "measured per point", 4),
            PICTURE,
            JSON,
        ),
    ),
    "network": (
        "benchmark.network:network_command",
        "what the way over the network adds to a request for an action chunk",
        (CONFIG, OVERRIDES, _count("--blocks", "in which all ways are measured", 7), JSON),
    ),
    "scaling": (
        "benchmark.scaling:scaling_command",
        "batches/s across device counts and placement modes",
        (
            CONFIG,
            OVERRIDES,
            _option("--backend", choices=["real", "virtual", "simulated"], help="default: by placement.virtual"),
            _option("--devices", metavar="N,N,...", type=_numbers, default=[1, 2, 4, 8], help="device counts"),
            _option(
                "--mode", metavar="NAME,...", default="all", help="placement modes, auto, synchronous reference; all"
            ),
            _count("--iterations", "measured per point", 4),
            _file("--csv", "also write the points to this file"),
            PICTURE,
            _file("--json", "also write the points to this file; points that it already holds are not measured again"),
        ),
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="vla-rl",
        description="Asynchronous actor-learner reinforcement learning of vision-language-action policies.",
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        _add(commands, name, *command)
    benchmark = commands.add_parser("benchmark", help="measure the runtime, or a simulator compared with its peers")
    kinds = benchmark.add_subparsers(title="benchmarks", dest="what", metavar="WHAT", required=True)
    for name, command in BENCHMARKS.items():
        _add(kinds, name, *command)
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


def _add(
    commands: Any, name: str, handler: Callable[[argparse.Namespace], int] | str, summary: str, arguments: tuple
) -> None:
    end = "" if summary.endswith("?") else "."
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}{end}")
    parser.set_defaults(handler=handler)
    for names, options in arguments:
        parser.add_argument(*names, **options)


if __name__ == "__main__":
    sys.exit(main())
