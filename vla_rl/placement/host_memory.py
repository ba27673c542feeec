"""What a run holds in the main memory of each node, and whether that fits; the memory of GPUs: ``memory``.

    always                          shared memory, env workers, the copy from which a checkpoint is written
    algo.memory_gib, value_memory   episodes that the learner's first rank keeps, and their copy in a checkpoint
    learner.offload_optimizer       for each trained weight 12 bytes of moments and master weights and 4 of gradients,
                                    divided among the ranks; 4 more where gradients are summed up here (stage 2 with
                                    fp32, stage 3); at stages 1 and 2, buffers in the dtype of the weights
    learner.offload_parameters      the weights, divided among the ranks
    policy.lora.merge_to_act        the original weights, for each inference server
    placement.offload               what the two roles of a shared device park here
    processor cores as devices      all that their roles hold

It is a lower bound: libraries, simulators and the operating system come on top.
"""

from collections.abc import Mapping

from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import GIB
from vla_rl.core.records import EnvSpec
from vla_rl.placement.learning_memory import kept_by
from vla_rl.placement.memory import (
    ELEMENT,
    Parts,
    average_bytes,
    describe_memory,
    learner_parts,
    memory_use,
    total,
    trained_weights,
)
from vla_rl.placement.plan import Plan, PlanError
from vla_rl.placement.profile import Memory
from vla_rl.placement.shared_memory import SharedMemoryNeeds

WORKER_BYTES = 100 << 20  # an env worker, before its simulator


def host_use(plan: Plan, memory: Memory, config: RunConfig, spec: EnvSpec, node: int = 0) -> dict[str, Parts]:
    """GiB that lie in a node's main memory, by role and by what it holds them for."""
    on_cores = "cpu" in {p.kind for p in plan.processes if p.devices}
    found = memory_use(plan, memory, config, node) if on_cores and plan.machines[node].devices else {}
    shared = SharedMemoryNeeds.of(config, spec, plan).total / GIB if node == 0 else 0.0
    workers = sum(worker.node == node for worker in plan.workers)
    found["env workers"] = {"processes": workers * WORKER_BYTES / GIB}
    found["shared memory"] = {"all": shared}
    here = sum(learner.node == node for learner in plan.learners)
    if plan.learners:
        offloaded = {part: here * size for part, size in _offloaded(config, memory, len(plan.learners)).items()}
        found["learner"] = _sum(found.get("learner", {}), offloaded)
        first = node == plan.learners[0].node
        each = 12 + average_bytes(config.learner)
        state = each * trained_weights(memory, config.learner) * here / len(plan.learners)
        kept = memory.kept * first
        found["checkpoint"] = {"policy": memory.weights * first, "state": state, "episodes": kept}
        found["learner"] |= {"episodes": kept}
    servers = sum(server.node == node for server in plan.servers)
    if config.policy.own_weights_key is not None:
        found["inference"] = _sum(found.get("inference", {}), {"original weights": servers * memory.weights})
    if plan.offload and not on_cores:
        on_device = learner_parts(config, memory, len(plan.learners))
        parked = here * sum(on_device[name] for name in ("weights", "reference", "optimizer"))
        found["parked"] = {"learner": parked, "inference": servers * memory.weights}
    return {role: held for role, parts in found.items() if (held := {x: size for x, size in parts.items() if size})}


def host_problem(plan: Plan, memory: Memory, config: RunConfig, spec: EnvSpec) -> PlanError | None:
    """The error, with the arithmetic, if a node's main memory is too small. Virtual devices hold nothing."""
    if config.placement.virtual is not None:
        return None
    for node, machine in enumerate(plan.machines):
        room = machine.memory
        parts = host_use(plan, memory, config, spec, node)
        shared = sum(parts.get("shared memory", {}).values())
        if total(parts) > room >= shared:  # ``SharedMemoryNeeds.check`` tells more of a need that is larger by itself
            where = f"node {node}" if plan.nodes > 1 else "this machine"
            key, remedy = _remedy(config, parts)
            text = f"{where} has {room:.0f} GiB of main memory and would hold {describe_memory(parts)} there; {remedy}"
            return PlanError(key, text)
    return None


def _offloaded(config: RunConfig, memory: Memory, ranks: int) -> Parts:
    """GiB that one of the learner's ranks keeps in main memory although it computes on a device."""
    learner = config.learner
    trained, element = trained_weights(memory, learner), ELEMENT[learner.precision]
    parts: Parts = {}
    if learner.offload_optimizer == "cpu":
        summed = learner.zero_stage == 3 or (learner.zero_stage == 2 and learner.precision == "fp32")
        state = 12 + average_bytes(learner)
        parts |= {"optimizer": state * trained / ranks, "gradients": (8 if summed else 4) * trained / ranks}
        parts["buffers"] = element * trained / ranks if learner.zero_stage < 3 else 0.0
    if learner.offload_parameters == "cpu":
        parts["weights"] = memory.weights / ranks
    return parts


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> Parts:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in (*first, *second)}


def _remedy(config: RunConfig, parts: Mapping[str, Parts]) -> tuple[str, str]:
    """The key that makes the largest part smaller, and what to do."""
    sizes = {(role, part): size for role, held in parts.items() for part, size in held.items()}
    role, part = max(sizes, key=lambda name: sizes[name])
    learner = config.learner
    fewer = list(filter(None, [config.policy.memory_remedy]))  # weights
    more = "use a machine with more memory"
    if role == "shared memory":
        return "train.batch_episodes", f"lower it, train.max_staleness or env.image_size, or {more}"
    if part == "episodes":
        return kept_by(config), f"lower it, or {more}"
    if role == "env workers":
        return "placement.env_workers", f"lower it, or {more}"
    if role == "parked":
        return "placement.offload", ", or ".join(["set it to never and use more devices", *fewer, more])
    if role == "learner" and learner.offload_parameters == "cpu" and part == "weights":
        return "learner.offload_parameters", ", or ".join(["set it to none", *fewer, more])
    if learner.offload_optimizer == "cpu":
        return "learner.offload_optimizer", ", or ".join([*fewer, "set it to none and use more GPUs", more])
    if config.policy.own_weights_key is not None:
        return f"policy.{config.policy.own_weights_key}", f"set it to false, or {more}"
    smaller = [] if learner.precision == "bf16" else ["set learner.precision=bf16"]
    return "learner.precision", ", or ".join([*fewer, *smaller, more])
