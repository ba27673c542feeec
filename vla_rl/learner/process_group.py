"""The process group of the learner's ranks."""

import os
from pathlib import Path

from vla_rl.core.machine import interface_of


def join_ranks(
    rank: int, world_size: int, meeting: tuple[str, int] | Path, device: str, here: str | None = None
) -> None:
    """Enter the learner's process group. Collective; called once, before a Learner is created.

    ``meeting``: host and port of rank 0, or a new file that all ranks see: then nothing listens to other machines.
    ``here``: the address by which other machines reach this one.
    """
    address, port = ("127.0.0.1", 0) if isinstance(meeting, Path) else meeting
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0" if device == "cuda" else str(rank),
        "DS_ACCELERATOR": device,
    }
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at first use, for tens of seconds
    method = None
    if isinstance(meeting, Path):
        method = f"file://{meeting.absolute()}?rank={rank}&world_size={world_size}"
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    elif here is not None and (interface := interface_of(here)) is not None:
        # gloo would take the address of this machine's own name, which often is a loopback address. NCCL looks at the
        # interfaces itself, and may use several.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    deepspeed.init_distributed(
        "nccl" if device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        init_method=method,
    )
