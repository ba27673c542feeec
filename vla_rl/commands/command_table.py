"""All commands: where each is, what it does, and its arguments. Nothing of it is imported before it runs."""

from pathlib import Path
from typing import Any

from vla_rl.commands.arguments import (
    CONFIG,
    CONFIG_HELP,
    JSON,
    OVERRIDES,
    PICTURE,
    amount,
    count,
    file,
    option,
    resumed_run,
    share,
    whole,
)

Command = tuple[str, str, tuple[Any, ...]]  # "module:function" below vla_rl.commands, summary, arguments

FAULT_NAMES = (
    *("kill", "freeze", "delay", "exception", "nan_observation", "nan_loss", "full_disk", "full_shared_memory"),
    *("corrupt_checkpoint", "driver", "node", "tree"),
)

COMMANDS: dict[str, Command] = {
    "train": (
        "launch:train_command",
        "train a policy by reinforcement learning",
        (
            option("config", metavar="CONFIG", nargs="?", help=CONFIG_HELP),
            OVERRIDES,
            option(
                "--resume",
                metavar="RUN[@ITERATION]",
                type=resumed_run,
                help="continue the run in this folder, with its config, from its newest checkpoint or from another one",
            ),
            JSON,
        ),
    ),
    "eval": (
        "launch:eval_command",
        "measure a policy's success rate",
        (
            option(
                "target",
                metavar="RUN_OR_CHECKPOINT",
                help="folder of a run or of a checkpoint, or hf://OWNER/NAME; or policy=remote, with "
                "policy.address=ws://HOST:PORT, for a policy server",
            ),
            OVERRIDES,
            option("--config", metavar="FILE", type=Path, help="YAML file; by default the run's own config"),
            option(
                "--best", action="store_true", help="of a run, the best checkpoint by its evaluations; else the newest"
            ),
            option("--tasks", metavar="N,N,...", help="task numbers within the suite; as env.tasks=[N,N,...]"),
            count("--episodes", "number of episodes, over all tasks together"),
            file("--video", "save a film of the first three episodes, an mp4 file"),
            count("--failures", "with --video: film N episodes, failures first; each is played again for that"),
            option(
                "--suite",
                metavar="NAME,...",
                help="all, or names: play these benchmark suites, each task as often as the others; an interrupted "
                "command continues when it is repeated",
            ),
            count("--per-task", "with --suite: episodes of each task", 50),
            count("--max-tasks", "with --suite: this many tasks of each suite at most, evenly spread"),
            option(
                "--videos",
                metavar="N",
                type=whole,
                default=1,
                help="with --suite: episodes of each task to film, failures first",
            ),
            option("--output", metavar="FOLDER", type=Path, help="with --suite: where the results are kept"),
            option("--sampled", action="store_true", help="sample actions instead of taking the most likely ones"),
            JSON,
        ),
    ),
    "diagnose": (
        "diagnose:diagnose_command",
        "find the convention (images, actions, statistics, prompt) that keeps a policy from succeeding",
        (
            option("target", metavar="CHECKPOINT", help="folder of a checkpoint or of a run, or hf://OWNER/NAME"),
            option("config", metavar="CONFIG", nargs="?", help=f"{CONFIG_HELP}; by default the run's own"),
            OVERRIDES,
            option("--demos", metavar="DATA", type=Path, help="demonstrations; by default the simulator's expert's"),
            option(
                "--episodes", metavar="N", type=whole, default=4, help="episodes to play with each setting; 0: none"
            ),
            JSON,
        ),
    ),
    "serve": (
        "serve:serve_command",
        "answer openpi's clients and vla-eval over the network, with a policy of a run or a checkpoint",
        (
            option("target", metavar="CHECKPOINT", help="folder of a checkpoint or of a run, or hf://OWNER/NAME"),
            option("config", metavar="CONFIG", nargs="?", help=f"{CONFIG_HELP}; by default the run's own"),
            OVERRIDES,
            option("--host", metavar="ADDRESS", default="127.0.0.1", help="to listen at; others need a token"),
            option("--port", metavar="N", type=whole, default=8000, help="to listen at; 0: one that is free"),
            option(
                "--token-file",
                metavar="FILE",
                type=Path,
                help="what clients have to know; by default VLA_RL_TOKEN of the environment",
            ),
            count("--connections", "clients at a time", 16),
            option("--sampled", action="store_true", help="sample actions instead of taking the most likely ones"),
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
            option("action", choices=("inspect",), help="what to do with them"),
            option("data", metavar="DATA", type=Path, help="HDF5 file, folder of such, or LeRobot data set"),
            CONFIG,
            OVERRIDES,
            file("--output", "a picture of frames and histograms"),
            JSON,
        ),
    ),
    "export": (
        "export:export_command",
        "write a policy in a layout that other projects read, or in this project's",
        (
            option("target", metavar="CHECKPOINT_OR_RUN", type=Path, help="folder of a checkpoint or of a run"),
            option(
                "--format",
                metavar="NAME",
                required=True,
                help="native: this project's; others by policy (docs/policies.md), listed if the policy lacks NAME",
            ),
            option("--output", metavar="FOLDER", type=Path, required=True, help="the new folder"),
            option(
                "--source",
                metavar="FOLDER",
                help="published checkpoint that training began with; by default the run's policy.checkpoint",
            ),
            option("--unnorm-key", metavar="NAME", help="data set whose statistics to read or to write"),
            count("--chunk-size", "of a published checkpoint, whose files do not say it: actions per inference; 8"),
            option(
                "--decoding",
                choices=["parallel", "autoregressive"],
                help="of a published checkpoint; by default as its files say",
            ),
            count("--views", "of a published checkpoint: camera images per observation; 1"),
        ),
    ),
    "push": (
        "push:push_command",
        "publish a run's policy on the model hub, with a model card made from the run",
        (
            option("run", metavar="RUN", type=Path, help="run folder"),
            option("--repo", metavar="OWNER/NAME", help="the repository; it is created if it is missing"),
            option("--best", action="store_true", help="the best checkpoint by its evaluations; else the newest"),
            option(
                "--evaluation",
                metavar="FOLDER",
                type=Path,
                help="results of `vla-rl eval --suite`; by default those of this checkpoint in evaluations/, if any",
            ),
            option("--private", action="store_true", help="create a private repository"),
            option(
                "--license",
                metavar="ID",
                default="unknown",
                help="license of the weights, as the hub writes it, such as apache-2.0 (default: unknown, since it "
                "depends on what they were trained from)",
            ),
            option("--dry-run", metavar="DIR", type=Path, help="write what would be pushed to this new folder"),
        ),
    ),
    "plot": (
        "plot:plot_command",
        "draw the curves of one run, or compare several",
        (
            option("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or a copy of its metrics.jsonl"),
            option(
                "--x",
                choices=("minutes", "steps", "episodes", "robot-hours"),
                default="minutes",
                help="what to draw over",
            ),
            file("--output", "the picture", Path("curves.png")),
            option(
                "--table",
                choices=("markdown", "latex"),
                help="instead, print runs as a table: success before and after, episodes, minutes",
            ),
            option(
                "--reach",
                metavar="RATE",
                type=share,
                help="instead, print how much of --x it took until greedy evaluations reached this success rate",
            ),
            file(
                "--animate",
                "instead, animate one run in this webp or gif file: films of its first and last evaluation, the curve",
            ),
            count("--kilobytes", "with --animate: what the file may have; it has lower quality or fewer frames", 400),
        ),
    ),
    "watch": (
        "watch:watch_command",
        "show a run that is going on, or one that is over, from another terminal",
        (
            option("run", metavar="RUN", type=Path, help="run folder"),
            option("--once", action="store_true", help="show it once, and end"),
            option("--follow", action="store_true", help="go on when the run ends: it may be resumed"),
        ),
    ),
    "report": (
        "report:report_command",
        "write what came out of one run, or of several, as a page of HTML that needs no network",
        (
            option("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or a copy of its metrics.jsonl"),
            file("--output", "the page; by default report.html, of one run in its folder, of several in this one"),
        ),
    ),
    "why": (
        "why:why_command",
        "say what is wrong with a run and what to do, from what it has recorded; exit status 1 if something is",
        (option("run", metavar="RUN", type=Path, help="run folder, or a copy of its metrics.jsonl"), JSON),
    ),
    "trace": (
        "trace:trace_command",
        "write what each process of a run did when, for Perfetto and as a picture",
        (
            option("run", metavar="RUN", type=Path, help="folder of a run with log.trace=true"),
            file("--output", "the trace, a json file; compressed if its name ends in .gz", Path("trace.json")),
            file("--picture", "also draw the end of the run, a png or svg file, below what its profile predicts"),
            option("--seconds", metavar="S", type=amount, default=20.0, help="with --picture: how long an end"),
        ),
    ),
    "world-model": (
        "world_model:world_model_command",
        "what a run's world model has learned, by its audit",
        (
            option("run", metavar="RUN", type=Path, help="run folder, or a copy of its metrics.jsonl"),
            file("--output", "the picture", Path("world_model.png")),
        ),
    ),
    "study": (
        "study:study_command",
        "train several variants with several seeds, and compare them",
        (
            option("study", metavar="STUDY", type=Path, help="YAML file, such as configs/studies/staleness.yaml"),
            option("--runs", metavar="FOLDER", type=Path, default=Path("runs"), help="where its runs are kept"),
            count("--jobs", "runs at a time", 1),
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
            option("--minutes", metavar="M", type=amount, default=10.0, help="of training with faults"),
            option(
                "--faults", metavar="KIND,...", default="all", help="all, none, or some of: " + ", ".join(FAULT_NAMES)
            ),
            option("--every", metavar="SECONDS", type=amount, default=20.0, help="mean pause before a fault"),
            count("--count", "no more faults after so many; the run goes on alone"),
            option("--seed", metavar="N", type=whole, default=0, help="of the faults and their moments"),
            option(
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
            option("simulator", choices=["libero"], help="the only one so far"),
            option("--suite", metavar="NAME,...", default="all", help="of these suites; by default all"),
            count("--states", "initial states of each task; by default all"),
            file("--record", "also write the settled states to this file, npz"),
            JSON,
        ),
    ),
    "plan": (
        "plan:plan_command",
        "show what would run where, and why",
        (
            CONFIG,
            OVERRIDES,
            option("--on", metavar="MACHINES", help="plan for these instead of this one, such as 8xH100+16x64cpu"),
            file("--output", "draw devices over time, a png file"),
            JSON,
        ),
    ),
    "profile": (
        "profile:profile_command",
        "measure what simulator, inference and learner cost here",
        (CONFIG, OVERRIDES, file("--output", "the profile", Path("profile.yaml"))),
    ),
    "config": (
        "config:config_command",
        "print all config keys, as a reference page or as a JSON Schema for editors, or the page of commands",
        (
            option(
                "what",
                choices=["docs", "schema", "commands"],
                help="docs: Markdown, docs/configuration.md; schema: JSON; commands: Markdown, docs/commands.md",
            ),
        ),
    ),
    "list": ("parts:list_command", "list simulators, policies and algorithms, with those of other packages", (JSON,)),
    "doctor": (
        "launch:doctor_command",
        "say what this machine, or each node of a Ray cluster, has and what it lacks, with the remedy",
        (
            option(
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
            option("address", metavar="ADDRESS", help="HOST:PORT of the running Ray cluster"),
            option("--node-ip-address", metavar="IP", help="of this machine, if the others reach it at this one only"),
        ),
    ),
}
