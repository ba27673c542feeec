"""Activation checkpointing (arXiv:1604.06174): memory for the time of a second forward pass."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def checkpoint_activations(policy: nn.Module) -> None:
    """Let every block of the towers and of the language model keep only its input for the backward pass.

    The backward pass computes the rest again, block by block, with the same numbers: no block draws random ones. It
    holds in training mode only. transformers' own switch would also make the embedding's outputs require gradients,
    which only reentrant checkpoints need.
    """
    function = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for block in policy.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block._gradient_checkpointing_func = function  # type: ignore[assignment]
            block.gradient_checkpointing = True
