"""Settings of torch that every process makes before it computes."""

import torch


def set_up_torch(device: str, threads: int) -> None:
    """``device``: "cuda" or "cpu". On a GPU, float32 matrices are multiplied in TF32: 10 bits, eight times as fast.

    Sampling and training must not differ in this, so there is no key for it.
    """
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
