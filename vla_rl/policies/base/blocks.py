"""The transformer blocks of a policy's networks, one by one: recomputed for the backward pass, or compiled."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

_MOST_SHAPES = 64  # of batches for which the compiler makes a version, before it gives up


def blocks_of(policy: nn.Module) -> Iterator[GradientCheckpointingLayer]:
    """Every block of the towers and of the language model."""
    return (module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer))


def checkpoint_activations(policy: nn.Module) -> None:
    """Let every block keep only its input for the backward pass (arXiv:1604.06174).

    The backward pass computes the rest again, block by block, with the same numbers: no block draws random ones. It
    holds in training mode only. transformers' own switch would also make the embedding's outputs require gradients,
    which only reentrant checkpoints need.
    """
    function = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for block in blocks_of(policy):
        block._gradient_checkpointing_func = function  # type: ignore[assignment]
        block.gradient_checkpointing = True


def prepare_training(policy: nn.Module, *, recomputed: bool, compiled: bool) -> None:
    """As ``learner.activation_checkpointing`` and ``learner.compile_blocks`` say."""
    if recomputed:
        checkpoint_activations(policy)
    if compiled:
        compile_blocks(policy)


def compile_blocks(policy: nn.Module) -> None:
    """Let ``torch.compile`` turn every block into few kernels, at its first calls.

    Blocks of one kind share what is compiled; a whole policy would take minutes. Names and weights stay as they are.
    """
    torch._dynamo.config.recompile_limit = max(_MOST_SHAPES, torch._dynamo.config.recompile_limit)
    for block in blocks_of(policy):
        block.compile()
