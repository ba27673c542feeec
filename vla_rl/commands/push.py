"""`vla-rl push`: a run's policy on the model hub, with a model card made from the run.

What is pushed is a checkpoint folder with its run's config: `vla-rl eval hf://OWNER/NAME` and `policy.checkpoint=
hf://OWNER/NAME` read it. Without `--repo`, `--dry-run DIR` writes the same files and needs no network.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vla_rl.commands.model_card import model_card
from vla_rl.commands.run_folder import RunFolder
from vla_rl.config.loading import load_config
from vla_rl.core.errors import UserError
from vla_rl.core.files import replacing
from vla_rl.core.hub import upload

_OF_RUN = {  # by their names in the repository
    "config.yaml": "config.yaml",
    "run_metadata.json": "metadata.json",
    "metrics.jsonl": "metrics.jsonl",
    "curves.png": "curves.png",
}
_VIDEOS = 4  # films of an evaluation that are pushed: of failures first, as they are named


def push_command(args: Any) -> int:
    """Collect the files, and push them, or write them to ``--dry-run``. Raises UserError."""
    output: Path | None = args.dry_run
    if args.repo is None and output is None:
        raise UserError("where to? --repo OWNER/NAME pushes, --dry-run DIR writes the same files to a new folder")
    if args.repo is not None and output is not None:
        raise UserError(f"--repo {args.repo} pushes and --dry-run {output} does not; leave one of them out")
    if output is not None and output.exists():
        raise UserError(f"--dry-run {output} exists; name a new folder")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", args.license):
        raise UserError(
            f"--license {args.license!r} is no identifier of the model hub: these have small letters, digits, '-' and "
            "'.', such as apache-2.0 or mit; unknown: nothing is said"
        )
    if not (args.run / "config.yaml").is_file():
        raise UserError(
            f"{args.run}: no run folder, {args.run / 'config.yaml'} does not exist; name a folder below runs/"
        )
    run = RunFolder(args.run, load_config(args.run / "config.yaml"))
    checkpoint = run.best_checkpoint() if args.best else run.checkpoints.newest()
    evaluation = _evaluation(args.evaluation, args.run.absolute().name, checkpoint.name)
    if output is not None:
        with replacing(output) as partial:
            collect(run, checkpoint, evaluation, partial, "OWNER/NAME", args.license)
        print(f"{output}: what would be pushed; nothing was")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        collect(run, checkpoint, evaluation, Path(folder) / "files", args.repo, args.license)
        message = f"{args.run.absolute().name}, iteration {int(checkpoint.name)}"
        address = upload(Path(folder) / "files", args.repo, private=args.private, message=message)
    print(f"{args.run} -> {address} (iteration {int(checkpoint.name)})")
    return 0


def _evaluation(given: Path | None, run: str, iteration: str) -> Path | None:
    """A folder of `vla-rl eval --suite`; the one that it makes by default, if none is given."""
    if given is not None:
        if not (given / "results.json").is_file():
            raise UserError(
                f"--evaluation {given}: {given / 'results.json'} does not exist; `vla-rl eval --suite` writes it"
            )
        return given
    default = Path("evaluations") / f"{run}-{iteration}"
    return default if (default / "results.json").is_file() else None


def collect(
    run: RunFolder, checkpoint: Path, evaluation: Path | None, folder: Path, repo: str, license_id: str
) -> None:
    """Write all files of the repository to the new ``folder``. ``license_id``: see ``model_card``."""
    shutil.copytree(checkpoint / "policy", folder)
    for name, own in _OF_RUN.items():
        if (run.path / own).is_file():
            shutil.copyfile(run.path / own, folder / name)
    video = run.path / "evaluations" / f"{checkpoint.name}-greedy.mp4"
    if video.is_file():
        shutil.copyfile(video, folder / "evaluation.mp4")
    if evaluation is not None:
        for name in ("results.json", "results.md", "protocol.json", "episodes.jsonl"):
            if (evaluation / name).is_file():
                (folder / "evaluation").mkdir(exist_ok=True)
                shutil.copyfile(evaluation / name, folder / "evaluation" / name)
        films = sorted((evaluation / "videos").rglob("*.mp4"), key=lambda path: ("failure" not in path.name, str(path)))
        for path in films[:_VIDEOS]:
            target = folder / "evaluation" / path.relative_to(evaluation)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (folder / "README.md").write_text(model_card(run, int(checkpoint.name), folder, repo, license_id))
