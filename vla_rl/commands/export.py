"""`vla-rl export`: write a policy in the layout that other projects read, or in this project's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.commands.checkpoints import Checkpoints
from vla_rl.config.loading import load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.policies.openvla_oft.hf_folder import PublishedFolder, is_published, open_published


@dataclass(frozen=True, slots=True)
class Exported:
    """What to write: a checkpoint, and the config of the run that made it, if known."""

    checkpoint: Path
    config: RunConfig | None


def export_command(args: Any) -> int:
    """Write the checkpoint that the arguments of `vla-rl export` name, and print where."""
    output: Path = args.output
    if output.exists():
        raise UserError(f"--output {output} exists; name a new folder")
    found = _find(args.target)
    from vla_rl.policies.openvla_oft.checkpoint import load_adapters, save_policy

    policy = _load(found, args)
    if args.format == "native":
        save_policy(policy, output, {"exported_from": str(found.checkpoint)})
    else:
        from vla_rl.policies.openvla_oft.hf_writer import write_adapters, write_published

        if args.format == "openvla" and (policy.architecture.proprio_dim or policy.architecture.views > 1):
            raise UserError(
                "--format openvla: OpenVLA has one image and no proprioception, the policy has "
                f"views={policy.architecture.views}, proprio_dim={policy.architecture.proprio_dim}; "
                "write --format openvla-oft"
            )
        source = _source(found, args.source)
        if args.format == "lora":
            write_adapters(policy, *load_adapters(found.checkpoint), source, output, args.unnorm_key)
        else:
            write_published(policy, source, output, args.unnorm_key)
    print(f"{found.checkpoint} -> {output} ({args.format})")
    return 0


def _find(target: Path) -> Exported:
    """A run's newest checkpoint, one of its checkpoints, or a checkpoint that stands alone."""
    if (target / "config.yaml").is_file():
        return Exported(Checkpoints(target / "checkpoints", 0).newest() / "policy", load_config(target / "config.yaml"))
    if (target / "policy").is_dir():
        target = target / "policy"
    run = target.absolute() / "../../../config.yaml"  # of RUN/checkpoints/NUMBER/policy
    return Exported(target, load_config(run) if run.is_file() else None)


def _load(found: Exported, args: Any) -> Any:
    if is_published(found.checkpoint):
        from vla_rl.policies.openvla_oft.hf_reader import load_published

        folder = open_published(found.checkpoint)
        variant = {} if args.decoding is None else {"decoding": args.decoding}
        return load_published(
            folder, views=args.views, chunk_size=args.chunk_size, unnorm_key=args.unnorm_key, variant=variant
        )
    from vla_rl.policies.openvla_oft.checkpoint import load_policy

    return load_policy(found.checkpoint)


def _source(found: Exported, given: str | None) -> PublishedFolder:
    """The published checkpoint from which to take what our model leaves out."""
    begun = found.config.policy.checkpoint if found.config is not None else None
    for candidate in (given, str(found.checkpoint), begun):
        if candidate is not None and (candidate == given or is_published(candidate)):
            return open_published(candidate)
    raise UserError(
        f"{found.checkpoint} lacks the blocks of the vision towers that no forward pass uses, and the files of the "
        "original code; name the published checkpoint that training began with: --source FOLDER"
    )
