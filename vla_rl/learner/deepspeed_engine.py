"""DeepSpeed around a policy: its engine, and the tensors it holds on the device."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.config.learner import ZERO_BUCKET, ZERO_LIVE, LearnerConfig
from vla_rl.core.devices.offload import Offloader
from vla_rl.policies.base.blocks import prepare_training
from vla_rl.policies.base.policy import Policy


def make_engine(policy: Policy, settings: LearnerConfig) -> tuple[Any, Any]:
    """The engine and its optimizer: AdamW, with a separate learning rate for the value head. Collective."""
    import deepspeed

    prepare_training(policy, recomputed=settings.activation_checkpointing, compiled=settings.compile_blocks)
    policy.train()
    value_lr = settings.lr if settings.value_lr is None else settings.value_lr
    groups: list[dict[str, Any]] = [
        {"params": list(policy.trunk_parameters()), "lr": settings.lr, "peak_lr": settings.lr, "part": "policy"},
        {"params": list(policy.value_parameters()), "lr": value_lr, "peak_lr": value_lr, "part": "value"},
    ]
    weights = [weight for group in groups for weight in group["params"]]
    cuda = weights[0].is_cuda
    optimizer = torch.optim.AdamW(
        groups, betas=settings.betas, weight_decay=settings.weight_decay, fused=uses_fused_adamw(settings, cuda) or None
    )
    ds_config = _engine_config(settings, sum(weight.numel() for weight in weights), cuda)
    engine, wrapped, _, _ = deepspeed.initialize(model=policy, optimizer=optimizer, config=ds_config)
    reset_unused_steps(wrapped)  # DeepSpeed makes the moments of some optimizers by a step without gradients
    if settings.precision == "bf16" and settings.zero_stage == 0:
        for weight in weights:
            weight.grad_dtype = torch.float32  # DeepSpeed accumulates in float32 under ZeRO only
    return engine, wrapped


def uses_fused_adamw(settings: LearnerConfig, cuda: bool) -> bool:
    """Whether AdamW makes one pass over each tensor instead of ten: on GPUs, and on the host for offloaded state."""
    return cuda or settings.offload_optimizer == "cpu"


def _engine_config(settings: LearnerConfig, trained: int, cuda: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. ``trained``: number of trained weights."""
    # DeepSpeed's default buckets are for large models: 2 GB each, which offloading would copy as zeros
    bucket = min(ZERO_BUCKET, trained)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        # boundaries are set by hand: the number of micro-batches differs from one optimizer step to the next
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # ``OptimizerSteps`` clips each part by its own norm
        "zero_optimization": {
            "stage": settings.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_max_live_parameters": ZERO_LIVE,
            "offload_optimizer": {"device": settings.offload_optimizer, "pin_memory": cuda},
        },
        # immediately: stage 1 would add up sums of micro-batches instead of micro-batches
        "bf16": {"enabled": settings.precision == "bf16", "immediate_grad_update": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if settings.offload_parameters != "none":
        config["zero_optimization"]["offload_param"] = {"device": settings.offload_parameters, "pin_memory": cuda}
    if settings.precision == "bf16" and settings.zero_stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if settings.precision == "bf16" and settings.zero_stage < 2:
        config["communication_data_type"] = "fp32"  # what is reduced has been accumulated
    return config


def reset_unused_steps(optimizer: Any) -> None:
    """Set the step counts of weights that have only had zero gradients back to 0.

    Adam's bias correction would take them for weights with a long history of zeros, and make their first steps too
    small.
    """
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        if "step" in state and not state["exp_avg_sq"].any():
            state["step"].zero_()


def make_offloader(engine: Any, reference: Policy | None, device: torch.device) -> Offloader:
    """An offloader of everything that a learner holds on its device.

    These are weights, gradients, optimizer state, master weights, buffers and the reference policy. Frozen weights
    and the reference are constant, except under ZeRO-3, which keeps frozen and trained weights in one buffer.
    """
    models: list[nn.Module] = [engine.module, *([] if reference is None else [reference])]
    weights = [weight for model in models for weight in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    mixed = set(engine.module.parameters()) if engine.zero_optimization_stage() == 3 else set()
    offloader = Offloader(
        device,
        lambda: tensors_held(weights, buffers, engine.optimizer),
        constant=[weight for weight in weights if not weight.requires_grad and weight not in mixed],
    )
    for model in models:
        offloader.guard(model)
    return offloader


def tensors_held(*roots: object) -> Iterator[Tensor]:
    """All tensors that are reachable from ``roots`` through containers, optimizers and DeepSpeed's objects.

    This includes their gradients and the attributes that DeepSpeed adds to them. It is a search instead of a list of
    names, because every ZeRO stage and precision has other buffers, whose names change between releases.
    """
    seen: dict[int, object] = {}  # keeps them alive, so that no id is reused
    rest = list(roots)
    while rest:
        item = rest.pop()
        if id(item) in seen or isinstance(item, nn.Module):
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            yield item
            if item.is_leaf:
                rest.append(item.grad)
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            rest += item
        if isinstance(item, (Tensor, torch.optim.Optimizer)) or type(item).__module__.startswith("deepspeed."):
            rest += getattr(item, "__dict__", {}).values()
