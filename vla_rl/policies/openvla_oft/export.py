"""`vla-rl export` of OpenVLA and OpenVLA-OFT: the layouts in which they are published, and this project's."""

from pathlib import Path

from vla_rl.core.errors import UserError
from vla_rl.policies.base.export import Export
from vla_rl.policies.openvla_oft.checkpoint import load_adapters, load_policy, save_policy
from vla_rl.policies.openvla_oft.hf_folder import PublishedFolder, is_published, open_published
from vla_rl.policies.openvla_oft.hf_reader import load_published
from vla_rl.policies.openvla_oft.hf_writer import write_adapters, write_published
from vla_rl.policies.openvla_oft.trunk import OpenVLA

_CHUNK_SIZE, _VIEWS = 8, 1  # of a published checkpoint, whose files do not say it


def export_policy(request: Export) -> None:
    """See ``vla_rl.policies.build.export_policy``."""
    policy = _load(request)
    if request.format == "native":
        save_policy(policy, request.output, request.origin)
        return
    arch = policy.architecture
    if request.format == "openvla" and (arch.proprio_dim or arch.views > 1):
        raise UserError(
            "--format openvla: OpenVLA has one image and no proprioception, the policy has "
            f"views={arch.views}, proprio_dim={arch.proprio_dim}; write --format openvla-oft"
        )
    source, unnorm_key = _source(request), request.options.get("unnorm_key")
    if request.format == "lora":
        write_adapters(policy, *load_adapters(request.checkpoint), source, request.output, unnorm_key)
    else:
        write_published(policy, source, request.output, unnorm_key)


def _load(request: Export) -> OpenVLA:
    if not is_published(request.checkpoint):
        return load_policy(request.checkpoint)
    given = request.options
    return load_published(
        open_published(request.checkpoint),
        views=given.get("views", _VIEWS),
        chunk_size=given.get("chunk_size", _CHUNK_SIZE),
        unnorm_key=given.get("unnorm_key"),
        variant={"decoding": given["decoding"]} if "decoding" in given else {},
    )


def _source(request: Export) -> PublishedFolder:
    """The published checkpoint from which to take what our model leaves out."""
    if "source" in request.options:
        return open_published(request.options["source"])
    begun = request.config.checkpoint if request.config is not None else None
    candidates: tuple[str | Path | None, ...] = (request.checkpoint, begun)
    for candidate in candidates:
        if candidate is not None and is_published(candidate):
            return open_published(candidate)
    raise UserError(
        f"{request.checkpoint}: the published layout also has blocks of the vision towers that no forward pass uses, "
        "and the files of the original code, which a run does not keep; name the published checkpoint that training "
        "began with: --source FOLDER. A policy that began with random weights has none: `--format native` copies it"
    )
