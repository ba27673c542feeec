"""`vla-rl eval`: evaluation with simulators and inference servers, without a learner; also used during training."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from algos import trains_value_head
from vla_rl.cluster.cluster import Cluster
from vla_rl.commands.dataset import complete_dataset
from vla_rl.commands.loggers import guarded
from vla_rl.commands.metadata import git_commit
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.loading import load_config, modules_named
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import StallError, UserError
from vla_rl.core.files import write_json
from vla_rl.core.hub import download, is_hub_address
from vla_rl.core.records import EnvSpec, EpisodeResult, EpisodeSpec
from vla_rl.core.shipped import find_input
from vla_rl.observability.console import StatusDisplay, make_console, minutes_left
from vla_rl.observability.success_rate import Evaluation
from vla_rl.placement.checks import load_checked_config
from vla_rl.placement.planner import plan_run
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.schedule import evaluation_episodes

_PUSHED = "model.safetensors"  # next to its config: a checkpoint that `vla-rl push` has made of a run
STALL_S = 900.0  # the run fails if no episode finishes for this long


def evaluate_command(args: Any) -> int:
    """Evaluate a run's newest checkpoint, or a policy checkpoint, as the arguments of `vla-rl eval` say."""
    if args.failures is not None and args.video is None:
        raise UserError(f"--failures {args.failures}: into which film? Name it, too: --video FILE")
    config = config_of_target(args.target, args.config, args.overrides, give="--config FILE", best=args.best)
    episodes = args.episodes or config.train.eval_episodes or 50
    record = 3 if args.video and args.failures is None else 0
    evaluation = evaluate_policy(config, episodes, greedy=not args.sampled, record=record, failures=args.failures or 0)
    console = make_console()
    about = ", ".join(filter(None, (evaluation.spec.name, f"assets: {evaluation.spec.assets}", evaluation.spec.engine)))
    for note in (f"{config.policy.origin} on {about}", *evaluation.spec.notes):
        console.print(note, highlight=False, markup=False)
    console.print(evaluation.text(), highlight=False, markup=False)
    if len(evaluation.per_task()) > 1:
        console.print(evaluation.table())
    if evaluation.spec.assets == "placeholder":
        console.print("on placeholder assets: not a benchmark number", highlight=False)
    if args.video and evaluation.filmed:
        with guarded(f"the film {args.video}"):
            evaluation.film(args.video)
            failed = sum(not result.success for result in evaluation.filmed)
            about = f"{len(evaluation.filmed)} episodes, {failed} failed"
            console.print(f"video: {args.video} ({about})", highlight=False, markup=False)
    if args.json:
        source = {"checkpoint": config.policy.origin, "git_commit": git_commit()}
        write_json(args.json, source | evaluation.record())
    return 0


def evaluate_policy(
    config: RunConfig, episodes: int, *, greedy: bool, record: int = 0, failures: int = 0
) -> Evaluation:
    """Evaluate ``policy.checkpoint`` on the benchmark's initial states.

    ``record``: film the first so many episodes. ``failures``: film so many, failures first; these are played again.
    """
    from envs import env_spec

    console = make_console()
    with StatusDisplay(console, "starting: simulator") as line:
        spec = env_spec(config.env)
        with evaluation_cluster(config, spec, line.update) as cluster:
            (evaluation,) = run_evaluations(
                cluster, spec, episodes, config.seed, kinds=[greedy], record=record, status=line.update
            )
            if not failures:
                return evaluation
            chosen = failures_first(evaluation.counted)[:failures]
            again = list(play_again(cluster, [result.episode for result in chosen], "filming", line.update))
    alike = replays_alike(chosen, again)
    if len(alike) < len(chosen):
        note = (
            f"{len(chosen) - len(alike)} of {len(chosen)} episodes did not end alike when they were played again, and "
            "are not in the film: inference rounds by the size of its batches"
        )
        console.print(note, highlight=False, markup=False)
    return replace(evaluation, replays=alike)


def failures_first(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Failures, then successes; each in the order of the evaluation's list."""
    return sorted(results, key=lambda result: (result.success, result.episode.id))


def play_again(
    cluster: Cluster, episodes: Sequence[EpisodeSpec], title: str, status: Callable[[str], None]
) -> Iterator[EpisodeResult]:
    """Evaluation episodes once more, with their frames; without those whose simulator dies.

    Start and random numbers belong to the episode, so that equal decisions lead to the same film. Rounding in batches
    of another size may change one.
    """
    for result in play_episodes(cluster, [replace(e, record=True) for e in episodes], title, status):
        if not result.set_aside:
            yield result


def replays_alike(first: Sequence[EpisodeResult], again: Sequence[EpisodeResult]) -> tuple[EpisodeResult, ...]:
    """Those that ended as they did the ``first`` time, after as many steps, and in that order."""
    found = {_start(result.episode): result for result in again}
    pairs = [(result, found.get(_start(result.episode))) for result in first]
    return tuple(replay for result, replay in pairs if replay is not None and _end(replay) == _end(result))


def _start(episode: EpisodeSpec) -> EpisodeSpec:
    """All that decides how an episode goes: the store numbers each play anew."""
    return replace(episode, id=0, record=False)


def _end(result: EpisodeResult) -> tuple[bool, bool, int]:
    return result.success, result.terminated, result.steps


@contextmanager
def evaluation_cluster(config: RunConfig, spec: EnvSpec, status: Callable[[str], None]) -> Iterator[Cluster]:
    """Started processes that play evaluation episodes with ``policy.checkpoint``. ``status`` is told how far the start
    is. Raises UserError before they start, where the mistake can be found that early."""
    from vla_rl.policies.build import check_policy

    check_policy(config.policy, spec)
    rules = replace(StoreRules.of(config, spec), iterations=0)
    plan = plan_run(config, spec, training=False)
    status("starting: Ray")
    with complete_dataset(config, spec), Cluster(config, plan, spec, rules) as cluster:
        cluster.status = status
        cluster.start(None, 0)
        cluster.call_store("open")
        yield cluster


def config_of_arguments(args: Any) -> RunConfig:
    """Of a command with the arguments TARGET [CONFIG] [KEY=VALUE ...]. Raises as ``config_of_target``."""
    given, overrides = args.config, args.overrides
    if given is not None and "=" in given and not Path(given).exists():
        given, overrides = None, [given, *overrides]
    file = None if given is None else Path(given)
    return config_of_target(args.target, file, overrides, give=f"{args.target} CONFIG", best=False)


def config_of_target(target: str, file: Path | None, overrides: list[str], *, give: str, best: bool) -> RunConfig:
    """The config to evaluate a run, a checkpoint, or one on the hub; or what keys of ``policy`` in place of a target
    say, such as ``policy=remote``. ``give``: how the caller's user names ``file``. Raises UserError, as
    ``evaluated_config`` does."""
    if "=" not in target or Path(target).exists():
        found, downloaded = local_target(target), is_hub_address(target)
        return evaluated_config(found, file, overrides, give=give, best=best, downloaded=downloaded)
    config = load_checked_config(file, [target, *overrides])
    if config.policy.checkpoint is None and not config.policy.elsewhere:
        raise UserError(
            f"{target}: policy.name={config.policy.name} has random weights; name a run, a checkpoint, or the "
            "server of another policy (policy=remote policy.address=ws://HOST:PORT)"
        )
    if best:
        raise UserError(f"--best: {target} is not the folder of a run, which has several checkpoints; leave it out")
    return config


def local_target(target: str) -> Path:
    """The folder that a target of `vla-rl eval` names; one on the hub is downloaded. Raises UserError."""
    return download(target, "model") if is_hub_address(target) else Path(find_input(target, None))


def evaluated_config(
    target: Path, file: Path | None, overrides: list[str], *, give: str, best: bool, downloaded: bool = False
) -> RunConfig:
    """The config of a run, or of the run that a checkpoint belongs to, with ``policy.checkpoint`` set. ``give``: how
    the caller's user names ``file``.

    Raises UserError also if the target was ``downloaded``, and its config names modules that ``overrides`` do not: what
    somebody else has written decides over no code that runs here.
    """
    own = config_of_run(target)
    if downloaded and own is not None:
        _require_trust(own, overrides)
    if (target / "config.yaml").is_file() and not (target / _PUSHED).is_file():
        run = RunFolder(target, load_config(target / "config.yaml"))
        checkpoint = (run.best_checkpoint() if best else run.checkpoints.newest()) / "policy"
    elif best:
        raise UserError(f"--best: {target} is not the folder of a run, which has several checkpoints; leave it out")
    else:
        checkpoint = target / "policy" if (target / "policy").is_dir() else target
    file = file or own
    if file is None:
        raise UserError(
            f"{target}: neither a run folder nor a checkpoint of a run, so its simulator is unknown; "
            f"give the config: {give}"
        )
    if not any(text.startswith("policy.checkpoint=") for text in overrides):  # last: policy=NAME resets the others
        overrides = [*overrides, f"policy.checkpoint={json.dumps(str(checkpoint))}"]
    config = load_checked_config(file, overrides)
    return config.with_values({f"policy.{name}": value for name, value in config.policy.merged.items()})


def _require_trust(config: Path, overrides: list[str]) -> None:
    pairs = [text.partition("=") for text in overrides]
    given = {key.removesuffix(".name") + "=" + value.strip("\"' ") for key, _, value in pairs}
    if foreign := [named for named in modules_named(config) if named not in given]:
        raise UserError(
            f"{config} was downloaded and imports code: {', '.join(foreign)}. If you trust that code, repeat this on "
            "the command line; or evaluate a copy of the folder, with a config.yaml of your own"
        )


def config_of_run(target: Path) -> Path | None:
    """The config of the run that made a target of `vla-rl eval`: RUN, RUN/checkpoints/N or its folder policy."""
    number = target.absolute().parent if target.name == "policy" else target.absolute()
    candidates = [target, *([number.parent.parent] if number.parent.name == "checkpoints" else [])]
    return next((path / "config.yaml" for path in candidates if (path / "config.yaml").is_file()), None)


def run_evaluations(
    cluster: Cluster,
    spec: EnvSpec,
    episodes: int,
    seed: int,
    *,
    kinds: Sequence[bool],
    record: int,
    status: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> list[Evaluation]:
    """Play evaluation episodes on a started cluster: ``episodes`` of each of ``kinds``, which are greedy or not.

    They are played together, so that simulators wait for the last episode once. The first kind is recorded. ``status``
    is called with a line of progress. Empty if it is ``stopped`` meanwhile. Raises StallError as ``play_episodes``.
    """
    to_play = [
        episode
        for number, greedy in enumerate(kinds)
        for episode in evaluation_episodes(
            0, episodes, len(spec.instructions), spec.init_states, seed, greedy=greedy, record=0 if number else record
        )
    ]
    title = " and ".join("greedy" if greedy else "sampled" for greedy in kinds)
    results = tuple(play_episodes(cluster, to_play, f"evaluating ({title})", status, stopped))
    if len(results) < len(to_play):
        return []
    return [Evaluation(spec, greedy, tuple(r for r in results if r.episode.greedy == greedy)) for greedy in kinds]


def play_episodes(
    cluster: Cluster,
    episodes: Sequence[EpisodeSpec],
    title: str,
    status: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[EpisodeResult]:
    """The results of evaluation episodes, each as soon as it is there; fewer if ``stopped`` meanwhile.

    Those with frames have values if the run's algorithm trains the value head. Raises StallError if no episode finishes
    for ``STALL_S`` seconds.
    """
    valued = trains_value_head(cluster.config.algo) and not cluster.config.policy.elsewhere
    cluster.call_store("assign_evaluation", episodes)
    start, done = time.monotonic(), 0
    deadline = start + STALL_S
    while done < len(episodes) and not stopped():
        ref: Any = cluster.store.evaluation_results.remote(done + 1, 2.0, done)
        new: list[EpisodeResult] = cluster.get(ref, "evaluation episodes", 120.0)
        yield from (new if valued else [replace(result, values=()) for result in new])
        if new:
            done, deadline = done + len(new), time.monotonic() + STALL_S
            cluster.progressed()
        left = f", {minutes_left(time.monotonic() - start, done, len(episodes))}" if done else ""
        building = "" if done or not (found := cluster.building()) else f", {found} ready"
        waits = f"; waiting for env hosts, {wanted}" if (wanted := cluster.wanted) else ""
        status(f"{title}: {done} of {len(episodes)} episodes{left}{building}{waits}")
        deadline = time.monotonic() + STALL_S if wanted else deadline
        if time.monotonic() > deadline:
            raise StallError(f"no evaluation episode finished for {STALL_S:.0f} s ({done} of {len(episodes)} done)")
