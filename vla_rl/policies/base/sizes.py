"""What a policy takes, without building it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """Numbers of weights, and bytes of activations."""

    parameters: int  # weights, those of adapters included
    trained: int  # of these, the ones that require gradients
    train_each: int  # bytes of one observation at the peak of forward and backward pass
    saved_each: int  # of these, what is held between the two
    infer_each: int  # bytes of one observation at the peak of a forward pass without gradients
    features: int = 0  # numbers in a row of ``PolicyOutput.features``; 0: not known
