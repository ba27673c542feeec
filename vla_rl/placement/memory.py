"""What the roles of a plan hold on its devices, and whether that fits; main memory: ``host_memory``.

Sizes of the policy follow from the configuration (``expected_memory``), those of a simulator on devices from a profile.
The learner's bytes for each trained weight depend on the ZeRO stage (arXiv:1910.02054): R ranks share what is marked.

    stage           0              1              2              3
    fp32 gradients  4              4 + 4 / R      4 / R          4 / R
         optimizer  8              12 / R         12 / R         12 / R       moments; master weights under ZeRO
    bf16 gradients  4              4              4 / R          4 / R        float32
         optimizer  12             12 / R         12 / R         12 / R       moments and master weights

Buckets in which ZeRO reduces gradients come on top; stage 3 divides the weights as well, and gathers some at a time.
Averaged weights (``learner.ema``) are 4 bytes more beside the optimizer's state, divided like it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vla_rl.config.learner import ZERO_BUCKET, ZERO_LIVE, LearnerConfig
from vla_rl.config.run_config import RunConfig
from vla_rl.config.world_model import ENCODER_ROWS
from vla_rl.core.machine import GIB, Machine
from vla_rl.core.records import EnvSpec
from vla_rl.placement.learning_memory import critic_bytes, kept_bytes
from vla_rl.placement.plan import Plan, PlanError, Process, draws_on_devices, sharing_learner
from vla_rl.placement.profile import Memory, load_profile
from vla_rl.policies.build import policy_sizes

ELEMENT = {"fp32": 4, "bf16": 2}  # bytes of a weight
_TRAINED = {"fp32": 12, "bf16": 16}  # bytes of gradient and optimizer state of a trained weight, on one unsharded rank
_DRAWING = 0.3  # GiB of the context in which an env worker on cores draws on a device, an assumption
_LARGEST_IN_FP32 = 1.0  # billion weights of a policy on GPUs
_CONTEXT = 0.5  # GiB of a CUDA context and its libraries' work space in each process, an assumption

Parts = dict[str, float]  # GiB by what they are for


def expected_memory(config: RunConfig, spec: EnvSpec, machine: Machine) -> Memory:
    """Memory of the run's policy by its configuration. Virtual devices hold what their profile says."""
    if config.placement.virtual is not None:
        return load_profile(Path(config.placement.virtual)).memory
    learner = config.learner
    sizes = policy_sizes(
        config.policy, spec, ELEMENT[learner.precision], activation_checkpointing=learner.activation_checkpointing
    )
    return Memory(
        device=min((gpu.memory for gpu in machine.gpus), default=machine.memory) / GIB,
        weights=sizes.parameters * ELEMENT[learner.precision] / GIB,
        trained=sizes.trained * _TRAINED[learner.precision] / GIB,
        infer_each=sizes.infer_each / GIB,
        train_each=sizes.train_each / GIB,
        draw_each=_DRAWING,
        critic=critic_bytes(config, spec, sizes.features) / GIB,
        kept=kept_bytes(config, spec, sizes.features) / GIB,
    )


def memory_use(plan: Plan, memory: Memory, config: RunConfig, device: int) -> dict[str, Parts]:
    """GiB of each role on a device, by what it holds them for. CPU cores of one node share its memory: they count as
    one device."""
    layout = plan.layout
    simulator = {"simulator": memory.simulate_fixed + memory.simulate_each * plan.envs_per_worker}
    acting = memory.weights
    if any(device in s.devices and sharing_learner(config, plan, s) is not None for s in plan.servers):
        acting = trained_weights(memory, config.learner) * ELEMENT[config.learner.precision]
    rows = config.placement.padded_rows(plan.max_batch)
    inference = {"weights": acting, "activations": memory.infer_each * rows}
    encoder = {"weights": memory.weights, "activations": memory.infer_each * ENCODER_ROWS}
    roles: dict[str, tuple[tuple[Process, ...], Parts]] = {
        "simulator": (plan.workers if layout.simulators else (), simulator),
        "inference": (plan.servers, inference),
        "world model": ((plan.world_model,) if plan.world_model else (), encoder),
        "learner": (plan.learners, learner_parts(config, memory, max(1, len(plan.learners)))),
    }
    found = {}
    for name, (processes, parts) in roles.items():
        here = [process for process in processes if _shares_memory(plan, process, device)]
        if here:
            parts |= {"context": _CONTEXT} if here[0].kind == "cuda" else {}
            found[name] = {part: size * len(here) for part, size in parts.items() if size}
    if memory.draw_each and draws_on_devices(config, plan.servers[0].kind):
        workers = plan.drawing_devices().count(device)
        found |= {"drawing": {"contexts": memory.draw_each * workers}} if workers else {}
    return found


def fit_memory(plan: Plan, memory: Memory, config: RunConfig) -> Plan:
    """The plan; with offloading if inference and learner fit on a shared device only one at a time.

    Raises PlanError, with the arithmetic, if that does not help or is not allowed, and for a large policy in float32.
    """
    for device in sorted({d for p in plan.processes for d in p.devices}):
        parts = memory_use(plan, memory, config, device)
        if total(parts) <= memory.device:
            continue
        offloading = replace(plan, offload=True)
        separate = memory_use(offloading, memory, config, device)
        roles = {name: sum(held.values()) for name, held in separate.items()}
        at_once = sum(roles.values()) - min(roles.get("inference", 0.0), roles.get("learner", 0.0))
        host = "cpu" in {p.kind for p in plan.processes if p.devices}  # offloading would move things to the same memory
        what = "the machine" if host else f"device {device}"
        text = f"{plan.layout.describe()}: {what} has {memory.device:.0f} GiB and would hold {describe_memory(parts)}"
        if host or at_once > memory.device:
            raise PlanError("placement.mode", text + _remedies(config, parts, memory.device))
        if config.placement.offload == "never":
            raise PlanError("placement.offload", f"{text}; never forbids offloading, use auto")
        plan = offloading
    _require_fast_precision(plan, memory, config)
    return plan


def _require_fast_precision(plan: Plan, memory: Memory, config: RunConfig) -> None:
    """Raise PlanError for a large policy in float32 on GPUs: the default is meant for small ones."""
    billions = memory.weights * GIB / ELEMENT["fp32"] / 1e9
    on_gpus = "cuda" in {p.kind for p in plan.processes} and config.placement.virtual is None
    if on_gpus and config.learner.precision == "fp32" and billions > _LARGEST_IN_FP32:
        text = f"fp32 for {billions:.1f} billion weights: GPUs multiply bf16 many times as fast, in half of the memory"
        raise PlanError("learner.precision", f"{text}; set learner.precision=bf16")


def describe_memory(parts: Mapping[str, Parts]) -> str:
    """Such as ``inference 15.8 (weights 15.0, activations 0.8) + learner 16.5 (...) = 32.3 GiB``."""
    roles = []
    for name, held in parts.items():
        inside = f" ({', '.join(f'{part} {size:.1f}' for part, size in held.items())})" if len(held) > 1 else ""
        roles.append(f"{name} {sum(held.values()):.1f}{inside}")
    return f"{' + '.join(roles)} = {total(parts):.1f} GiB"


def total(parts: Mapping[str, Parts]) -> float:
    """GiB of all roles together."""
    return sum(sum(held.values()) for held in parts.values())


def _shares_memory(plan: Plan, process: Process, device: int) -> bool:
    if process.kind == "cpu" and process.devices:
        return process.node == plan.node_of(device)
    return device in process.devices


def trained_weights(memory: Memory, learner: LearnerConfig) -> float:
    """How many weights are trained, in units of 2^30."""
    return memory.trained / _TRAINED[learner.precision]


def average_bytes(learner: LearnerConfig) -> int:
    """Of a trained weight's average, which lies with the optimizer's state."""
    return 4 if learner.ema is not None else 0


def learner_parts(config: RunConfig, memory: Memory, ranks: int) -> Parts:
    """GiB of one rank at the peak of an update."""
    learner, trained = config.learner, trained_weights(memory, config.learner)
    stage, element = learner.zero_stage, ELEMENT[learner.precision]
    weights, bucket = memory.weights, min(ZERO_BUCKET / GIB, trained)
    if stage == 3:
        gathered = min(weights, ZERO_LIVE * element / GIB)
        weights = gathered + (weights / ranks if learner.offload_parameters == "none" else 0.0)
    on_device = learner.offload_optimizer == "none"
    gradients = 4 * trained
    if stage >= 2:  # summed up on the host if that has the optimizer, except by stage 2 with bf16
        gradients *= (on_device or (stage == 2 and learner.precision == "bf16")) / ranks
    if stage == 1 and learner.precision == "fp32":
        gradients += 4 * trained / ranks * on_device  # DeepSpeed keeps the reduced part and the whole
    if stage >= 2 or ranks > 1:
        gradients += (element if stage >= 2 else 4) * bucket
    state = 12 if stage else _TRAINED[learner.precision] - 4
    optimizer = (state + average_bytes(learner)) / (ranks if stage else 1) * trained
    work = config.algo.work(config.policy.chunk_size)
    copied = work.reference and not config.policy.holds_reference  # adapters can be switched off instead
    return {
        "weights": weights,
        "reference": memory.weights * copied,
        "gradients": gradients,
        "optimizer": optimizer * on_device,
        "activations": memory.train_each * (work.pass_rows or learner.micro_batch),
        "critic": memory.critic,
    }


def _remedies(config: RunConfig, parts: Mapping[str, Parts], room: float) -> str:
    """What would make the largest role smaller, the most effective first."""
    largest = max(parts, key=lambda name: sum(parts[name].values()))
    if largest == "drawing":
        return "; lower placement.env_workers, or let them draw on the cores (MUJOCO_GL=osmesa)"
    if largest == "world model":
        return "; set world_model=null, or use more or larger devices"
    if largest == "simulator":
        return "; lower placement.envs_per_worker"
    if largest == "inference" and sum(parts[largest].values()) <= room:
        return "; lower placement.max_batch or learner.micro_batch, or use more devices"
    learner, held = config.learner, parts.get("learner", {})
    state = held.get("gradients", 0.0) + held.get("optimizer", 0.0)
    remedies = []
    if held.get("activations", 0.0) > room / 10:
        kept = config.policy.has_blocks and not learner.activation_checkpointing
        remedies += ["set learner.activation_checkpointing=true"] if kept else []
        if config.algo.work(config.policy.chunk_size).pass_rows:
            remedies.append("lower algo.micro_batch")
        elif learner.micro_batch > 1:
            remedies.append("lower learner.micro_batch")
    if learner.precision == "fp32":
        remedies.append("set learner.precision=bf16")
    if state > room / 10:
        remedies += filter(None, [config.policy.memory_remedy])
        if learner.zero_stage < 2:
            remedies.append("shard its state over more devices with learner.zero_stage=2 or 3")
        remedies += ["set learner.offload_optimizer=cpu"] if learner.offload_optimizer == "none" else []
    return "; " + ", or ".join(remedies or ["use more or larger devices"])
