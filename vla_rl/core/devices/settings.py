"""Settings of torch that every process makes before it computes."""

import torch


def set_up_torch(device: str, threads: int, matmul: str = "fp32") -> None:
    """``device``: "cuda" or "cpu"; ``matmul``: the key ``learner.matmul``.

    With "fp32", float32 matrices are multiplied in TF32 on a GPU: 10 bits, eight times as fast. With "bf16", torch's
    libraries round the factors to bfloat16 where the device has instructions for it.
    """
    torch.set_num_threads(threads)
    if matmul == "bf16":
        torch.set_float32_matmul_precision("medium")
    elif device == "cuda":
        torch.set_float32_matmul_precision("high")
