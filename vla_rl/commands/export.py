"""`vla-rl export`: write a policy in a layout that other projects read, or in this project's own."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from envs import env_spec
from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.policies.base.export import Export
from vla_rl.policies.build import export_policy

_OPTIONS = ("source", "unnorm_key", "chunk_size", "decoding", "views")


def export_command(args: Any) -> int:
    """Write the checkpoint that the arguments of `vla-rl export` name, and print where."""
    given = {name: getattr(args, name) for name in _OPTIONS}
    checkpoint = export_target(args.target, args.output, args.format, given)
    print(f"{checkpoint} -> {args.output} ({args.format})")
    return 0


def export_target(target: Path, output: Path, layout: str, options: Mapping[str, Any]) -> Path:
    """Write a run's newest checkpoint, or a checkpoint, to the new folder ``output``; returns the checkpoint's folder.

    ``options``: of the layout; those that are None are left out. Raises UserError.
    """
    if output.exists():
        raise UserError(f"the output {output} exists; name a new folder")
    checkpoint, run = _find(target)
    request = Export(
        checkpoint,
        layout,
        output,
        config=None if run is None else run.policy,
        spec=None if run is None else partial(env_spec, run.env),
        options={name: value for name, value in options.items() if value is not None},
    )
    export_policy(request)
    return checkpoint


def _find(target: Path) -> tuple[Path, RunConfig | None]:
    """A run's newest checkpoint, one of its checkpoints, or a checkpoint that stands alone; the run's config."""
    if (target / "config.yaml").is_file():
        return Checkpoints(target / "checkpoints", 0).newest() / "policy", load_config(target / "config.yaml")
    if (target / "policy").is_dir():
        target = target / "policy"
    run = target.absolute() / "../../../config.yaml"  # of RUN/checkpoints/NUMBER/policy
    return target, load_config(run) if run.is_file() else None
