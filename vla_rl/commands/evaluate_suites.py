"""`vla-rl eval --suite`: a policy on whole benchmark suites, the same number of episodes of each task.

for each suite:   the episodes that the folder lacks ──▶ processes ──▶ episodes.jsonl, one line each
                  failures, played again ──▶ videos
                  results.json, results.md

docs/evaluation.md says what is played and how the numbers may be read.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vla_rl.cluster.cluster import Cluster
from vla_rl.commands.checkpoints import measure_files
from vla_rl.commands.evaluate import (
    config_of_run,
    config_of_target,
    evaluation_cluster,
    local_target,
    play_again,
    play_episodes,
)
from vla_rl.commands.evaluation_folder import EvaluationFolder
from vla_rl.commands.loggers import guarded
from vla_rl.commands.metadata import git_commit, machine_record, package_versions
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing, write_json
from vla_rl.core.records import EnvSpec, EpisodeSpec
from vla_rl.observability.benchmark_report import benchmark_results, episode_row, kinds_text, markdown
from vla_rl.observability.console import StatusDisplay, make_console
from vla_rl.observability.films import write_film
from vla_rl.observability.verdicts import SET_ASIDE, failure_kind
from vla_rl.replay.schedule import benchmark_episodes

_FORMAT = 1
_NOT_PART = {"env": {"suite", "tasks"}, "policy": {"checkpoint"}}  # of the protocol: it is stated apart


def evaluate_suites_command(args: Any) -> int:
    """Play what is missing, and write the results; `vla-rl eval --suite` has the arguments."""
    if any(given is not None for given in (args.episodes, args.video, args.failures)):
        raise UserError(
            "--episodes, --video and --failures are for one simulator; with --suite, use --per-task and --videos"
        )
    config = config_of_target(args.target, args.config, args.overrides, give="--config FILE", best=args.best)
    suites = _suites(config, args.suite)
    specs, absent = _specs(config, suites, args.suite)
    tasks = {suite: _tasks(spec, suite, args.tasks, args.max_tasks) for suite, spec in specs.items()}
    output: Path = args.output or Path("evaluations") / _name(config)
    console = make_console()
    folder = EvaluationFolder.open(output, _protocol(config, specs, greedy=not args.sampled))
    planned = {suite: args.per_task * len(numbers) for suite, numbers in tasks.items()}
    facts = [*_facts(local_target(args.target), config, specs, greedy=not args.sampled), *absent]
    try:
        for suite, spec in specs.items():
            episodes = benchmark_episodes(
                tasks[suite], args.per_task, spec.init_states, config.seed, greedy=not args.sampled
            )
            _play_suite(_config_of(config, suite), suite, spec, episodes, folder, args.videos, console)
            _write(folder, planned, facts, config, specs)
    finally:
        if folder.has_begun:
            results = _write(folder, planned, facts, config, specs)
        folder.close()
    console.print(_table(results))
    for fact in facts:
        console.print(fact.replace("**", ""), highlight=False, markup=False, soft_wrap=True)
    console.print(f"results: {output} (results.md, results.json, videos/)", highlight=False, markup=False)
    if args.json:
        write_json(args.json, results)
    return 0


def _suites(config: RunConfig, text: str) -> list[str]:
    known = list(config.env.suites())
    chosen: list[str] = []
    for name in known if text == "all" else text.split(","):
        found = list(config.env.suite_keys(name))
        if not found:
            raise UserError(f"--suite {text}: env={config.env.name} has no suite {name!r}: use {', '.join(known)}, all")
        chosen += found
    return list(dict.fromkeys(chosen))


def _config_of(config: RunConfig, suite: str) -> RunConfig:
    return config.with_values({f"env.{key}": value for key, value in config.env.suite_keys(suite)[suite].items()})


def _specs(config: RunConfig, suites: Sequence[str], text: str) -> tuple[dict[str, EnvSpec], list[str]]:
    """The suites that can be played, and why others cannot, which a pattern names with them."""
    from envs.base import NothingPlayable

    specs: dict[str, EnvSpec] = {}
    absent: list[str] = []
    for suite in suites:
        try:
            specs[suite] = _spec_of(config, suite)
        except NothingPlayable as error:
            if suite in text.split(",") or len(suites) == len(absent) + 1:
                raise
            absent.append(f"Left out: {error}")
    return specs, absent


def _spec_of(config: RunConfig, suite: str) -> EnvSpec:
    from envs import env_spec
    from vla_rl.policies.build import check_policy

    spec = env_spec(_config_of(config, suite).env)
    check_policy(config.policy, spec)
    return spec


def _tasks(spec: EnvSpec, suite: str, text: str | None, most: int | None) -> list[int]:
    """Those that ``text`` names, else ``most`` of all, evenly spread."""
    count = len(spec.instructions)
    if text is None:
        drawn = min(most or count, count)
        return [i * count // drawn for i in range(drawn)]
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--tasks {text}: write numbers, such as 0,3") from None
    if not all(0 <= number < count for number in numbers):
        raise UserError(f"--tasks {text}: {suite} has the tasks 0..{count - 1}")
    return numbers


def _play_suite(
    config: RunConfig,
    suite: str,
    spec: EnvSpec,
    episodes: Sequence[EpisodeSpec],
    folder: EvaluationFolder,
    videos: int,
    console: Console,
) -> None:
    """Play the episodes that are missing, then film; starts no process if nothing is missing."""
    played = folder.played(suite)
    missing = [episode for episode in episodes if (episode.task, episode.member) not in played]
    if not missing and not _to_film(folder, suite, episodes, videos):
        folder.begin()
        return
    with (
        StatusDisplay(console, f"{suite}, starting") as line,
        evaluation_cluster(config, spec, lambda text: line.update(f"{suite}, {text}")) as cluster,
    ):
        cluster.notify = lambda text: console.print(text, highlight=False, markup=False)
        folder.begin()
        for result in play_episodes(cluster, missing, suite, line.update):
            folder.add(episode_row(suite, spec.instructions[result.episode.task], result))
        _film(cluster, suite, _to_film(folder, suite, episodes, videos), folder, line.update)


def _to_film(folder: EvaluationFolder, suite: str, episodes: Sequence[EpisodeSpec], count: int) -> list[EpisodeSpec]:
    """Up to ``count`` episodes of each task that have no film yet: failures first; none that ends its simulator."""
    rows = [row for row in folder.of(suite) if row["failure"] != SET_ASIDE]
    success = {(row["task"], row["trial"]): row["success"] for row in rows}
    chosen = []
    for task in sorted({episode.task for episode in episodes}):
        own = [episode for episode in episodes if episode.task == task and (task, episode.member) in success]
        own.sort(key=lambda episode: success[episode.task, episode.member])  # stable
        chosen += [e for e in own[:count] if not folder.filmed(suite, e.task, e.member)]
    return chosen


def _film(
    cluster: Cluster,
    suite: str,
    episodes: Sequence[EpisodeSpec],
    folder: EvaluationFolder,
    status: Callable[[str], None],
) -> None:
    """Play episodes again and keep every frame. A film names its own outcome, which may be another than was counted
    (``play_again``)."""
    kinds = {(row["task"], row["trial"]): row["failure"] for row in folder.of(suite)}
    for result in play_again(cluster, episodes, f"{suite}, videos", status):
        key = result.episode.task, result.episode.member
        shown = failure_kind(result)
        outcome = f"failure-{shown}" if shown else "success"
        if (shown is None) != (kinds[key] is None):
            outcome += "-other-than-counted"
        film = folder.video(suite, *key, outcome)
        with guarded(f"the film {film}"):
            write_film(film, [result], cluster.spec)


def _protocol(config: RunConfig, specs: Mapping[str, EnvSpec], *, greedy: bool) -> dict[str, Any]:
    """What decides the results of an episode, JSON-able."""
    checkpoint = config.policy.checkpoint
    return {
        "format": _FORMAT,
        "checkpoint": measure_files(Path(checkpoint)) if checkpoint and Path(checkpoint).is_dir() else checkpoint,
        "env": config.env.model_dump(mode="json", exclude=_NOT_PART["env"]),
        "policy": config.policy.model_dump(mode="json", exclude=_NOT_PART["policy"]),
        "algo": config.algo.name,
        "precision": config.learner.precision,
        "seed": config.seed,
        "actions": "greedy" if greedy else "sampled",
        "assets": sorted({spec.assets for spec in specs.values()}),
        "engine": sorted({spec.engine for spec in specs.values()}),
    }


def _facts(target: Path, config: RunConfig, specs: Mapping[str, EnvSpec], *, greedy: bool) -> list[str]:
    """What a reader needs to know in order to trust the numbers; the separation of training and test first."""
    assets = sorted({spec.assets for spec in specs.values()})
    facts = [_separation(target)]
    engine = "".join(f" ({text})" for text in sorted({spec.engine for spec in specs.values() if spec.engine}))
    if "placeholder" in assets:
        facts.append("Placeholder assets replace LIBERO's: **not a benchmark number**.")
    return [
        *facts,
        f"Checkpoint: {config.policy.origin}; actions: {'greedy' if greedy else 'sampled'}; seed {config.seed}.",
        "Each task starts from the benchmark's initial states 0, 1, 2, ..., one episode each.",
        f"Simulator: {config.env.name}{engine}; assets: {', '.join(assets)}; commit: {git_commit()}.",
        "Intervals: 95 %, Wilson's, of the episodes of one policy; they do not cover the choice of a checkpoint.",
        *(f"{note}." for spec in specs.values() for note in spec.notes),
    ]


def _separation(target: Path) -> str:
    file = config_of_run(target)
    if file is None:
        return "The checkpoint belongs to no run folder: **which states it was trained on is not known here**."
    if load_config(file).train.start_states == "benchmark":
        return "Training started from the benchmark's initial states: **trained and tested on the same states**."
    return (
        "Training never saw the benchmark's initial states, on which this is measured "
        "(train.start_states=sampled: the simulator drew the placements)."
    )


def _name(config: RunConfig) -> str:
    """RUN-ITERATION of a run's checkpoint, else the name of its folder."""
    path = Path(config.policy.checkpoint or config.policy.size_name)
    own = path.name == "policy" and path.absolute().parent.parent.name == "checkpoints"
    return f"{path.absolute().parents[2].name}-{path.absolute().parent.name}" if own else path.name


def _write(
    folder: EvaluationFolder,
    planned: Mapping[str, int],
    facts: Sequence[str],
    config: RunConfig,
    specs: Mapping[str, EnvSpec],
) -> dict[str, Any]:
    found = benchmark_results(folder.rows, planned, config.env.averaged_suites)
    about = {"machine": machine_record(), "packages": package_versions(), "git_commit": git_commit()}
    left_out = {"left_out": {suite: spec.left_out for suite, spec in specs.items() if spec.left_out}}
    results = {"checkpoint": config.policy.origin, "facts": list(facts)} | found | left_out | about
    write_json(folder.path / "results.json", results)
    text = markdown(f"Evaluation of {_name(config)}", facts, found)
    videos = [path.relative_to(folder.path) for path in folder.videos()]
    if videos:
        first = sorted(videos, key=lambda path: ("failure" not in path.name, str(path)))
        text += "\n## Videos\n\n" + "".join(f"* [{path.parent.name}: {path.stem}]({path})\n" for path in first)
    with replacing(folder.path / "results.md") as partial:
        partial.write_text(text)
    return results


def _table(results: Mapping[str, Any]) -> Table:
    table = Table(title="success by suite")
    table.add_column("suite")
    for column in ("episodes", "success", "95 %", "failures"):
        table.add_column(column, justify="right")
    overall = results["overall"] | {"suite": "together: " + ", ".join(results["overall"]["suites"])}
    for part in (*results["suites"], *([overall] if len(overall["suites"]) > 1 else [])):
        interval = f"{part['success_low95']:.1%} to {part['success_high95']:.1%}"
        table.add_row(part["suite"], str(part["episodes"]), f"{part['success']:.1%}", interval, kinds_text(part))
    return table
