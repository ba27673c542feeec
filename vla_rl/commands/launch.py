"""Commands that say something before they import what takes seconds, or that stand for several."""

import argparse
from pathlib import Path

from vla_rl.core.errors import UserError


def train_command(args: argparse.Namespace) -> int:
    """Read the config, and begin or continue the run."""
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


def eval_command(args: argparse.Namespace) -> int:
    """One evaluation, or whole suites."""
    from vla_rl.observability.heartbeat import announcing

    with announcing("loading libraries"):
        from vla_rl.commands.evaluate import evaluate_command
        from vla_rl.commands.evaluate_suites import evaluate_suites_command
    if args.suite is not None:
        return evaluate_suites_command(args)

    if args.tasks is not None:
        args.overrides = [f"env.tasks=[{args.tasks}]", *args.overrides]
    return evaluate_command(args)


def doctor_command(args: argparse.Namespace) -> int:
    """Of this machine, or of a cluster."""
    if args.cluster is not None:
        from vla_rl.commands.doctor_cluster import doctor_cluster_command

        return doctor_cluster_command(args)
    from vla_rl.commands.doctor import doctor_command as of_machine

    return of_machine(args)
