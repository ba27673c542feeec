"""Environment variables of a run's processes: their threads, and which devices they see."""

from collections.abc import Sequence

from vla_rl.core.gpus import Gpu
from vla_rl.placement.plan import Plan, Process

# glibc returns large blocks at every free, and the kernel zeroes them again at the next use. On CPU cores that takes a
# fifth of a training step of the tiny policy, and the next step needs the same memory.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}


def variables(plan: Plan, process: Process | None, gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables of one process of ``plan``; None: of one that computes nothing.

    ``gpus``: those that the process's node offers to the run, in the order of the plan's devices. A process sees only
    its own; an env worker on cores sees the one on which it draws.
    """
    threads = str(process.threads if process else 1)
    found = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "LP_NUM_THREADS": "0"}  # see ``mujoco_setup``
    found["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads sleep instead of spinning on their cores
    if process is None:
        return found
    if process.role == "learner" and process.kind == "cpu":
        found |= _KEEP_MEMORY
    if process.kind == "cuda":
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[d].entry for d in plan.local_devices(process))
    elif (drawing := plan.drawing_device(process)) is not None:
        gpu = gpus[plan.local_device(drawing)]
        found |= {"CUDA_VISIBLE_DEVICES": gpu.entry, "MUJOCO_EGL_DEVICE_ID": str(gpu.number)}
    return found
