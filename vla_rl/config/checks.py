"""Checks for combinations of keys that are valid one by one and cannot run together."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from algos.config import PolicyGradientConfig
from algos.off_policy import OffPolicyConfig
from envs.libero.config import LIBERO_TASKS, LiberoConfig
from envs.workload.config import WorkloadConfig
from vla_rl.config.messages import KeyPath, Problem
from vla_rl.config.run_config import RunConfig
from vla_rl.policies.base.patches import STRIDE

_ACTORS = {  # remedies by what an actor needs
    "means": "its actions have no gradient, along which an actor follows a critic; use policy=gaussian or "
    "policy.head=l1 of openvla_oft",
    "steering": "no network chooses its noise; use a flow policy, such as policy=pi0, with policy.steer={}",
    "deviations": "it draws from no normal distribution, whose deviation a critic could move; use policy=gaussian",
}
_LONGEST_NAME = 200  # file systems allow 255, of which names of temporary files need some


@dataclass(frozen=True, slots=True)
class Check:
    """A search for problems of a config, and the keys that it reads."""

    reads: tuple[KeyPath, ...]
    find: Callable[[RunConfig], Iterable[Problem]]


def config_checks() -> tuple[Check, ...]:
    """Checks that hold on every machine; ``vla_rl.placement.checks`` has those of this machine."""
    return (
        Check((("env",),), _tasks_exist),
        Check((("env",), ("policy", "chunk_size")), _chunk_fits_episode),
        Check((("policy",), ("sft", "bin_smoothing")), _only_bins_are_smoothed),
        Check((("policy",), ("learner", "activation_checkpointing")), _only_blocks_are_recomputed),
        Check((("policy",), ("placement", "compile_blocks"), ("learner",)), _only_blocks_are_compiled),
        Check((("policy",), ("placement", "cuda_graphs")), _only_fixed_launches_are_recorded),
        Check((("learner", "betas"),), _betas_below_one),
        Check((("learner",),), _only_sharded_state_is_offloaded),
        Check((("algo",), ("train", "batch_episodes")), _batch_holds_whole_groups),
        Check((("train",), ("mode",)), _published_often_enough),
        Check((("train",), ("mode",)), _old_enough_to_be_reused),
        Check((("algo",), ("train", "reuse")), _reuse_is_corrected),
        Check((("algo",), ("policy",), ("env",), ("learner",), ("train", "reuse")), _off_policy_fits_policy_and_rank),
        Check((("policy",), ("algo",)), _off_policy_alone_steers),
        Check((("algo",), ("env",)), _reference_gives_no_state),
        Check((("world_model",), ("algo",)), _imagined_chunks_are_used),
        Check((("world_model",), ("env",)), _only_success_is_imagined),
        Check((("placement", "virtual"), ("env",)), _only_workload_is_virtual),
        Check((("placement", "replan_every"), ("placement", "mode")), _replanning_needs_auto),
        Check((("placement",),), _nodes_need_a_cluster),
        Check((("placement", "ray_address"),), _address_has_a_form),
        Check((("log", "name"),), _name_is_of_a_folder),
    )


def _tasks_exist(config: RunConfig) -> Iterator[Problem]:
    key = ("env", "tasks")
    tasks: tuple[int | str, ...] = getattr(config.env, "tasks", ())
    if isinstance(config.env, LiberoConfig) and config.env.suite in LIBERO_TASKS:
        count = LIBERO_TASKS[config.env.suite]
        if absent := ", ".join(str(task) for task in config.env.tasks if task >= count):
            yield Problem(key, f"{config.env.suite} has tasks 0..{count - 1}, not {absent}", list(tasks))
    if twice := ", ".join(sorted({str(task) for task in tasks if tasks.count(task) > 1})):
        yield Problem(key, f"names {twice} more than once; name each task once", list(tasks))


def _only_bins_are_smoothed(config: RunConfig) -> Iterator[Problem]:
    if config.sft.bin_smoothing and not config.policy.discrete:
        remedy = f"smooths bins, which policy.name={config.policy.name} does not have; set it to 0"
        yield Problem(("sft", "bin_smoothing"), remedy, config.sft.bin_smoothing)


def _only_blocks_are_recomputed(config: RunConfig) -> Iterator[Problem]:
    if config.learner.activation_checkpointing and not config.policy.has_blocks:
        remedy = f"policy.name={config.policy.name} cannot compute its blocks a second time; set it to false"
        yield Problem(("learner", "activation_checkpointing"), remedy, True)


def _only_blocks_are_compiled(config: RunConfig) -> Iterator[Problem]:
    for group in ("placement", "learner"):
        if getattr(config, group).compile_blocks and not config.policy.has_blocks:
            remedy = f"policy.name={config.policy.name} has none that can be compiled; set it to false"
            yield Problem((group, "compile_blocks"), remedy, True)
    if config.learner.compile_blocks and config.learner.zero_stage == 3:
        remedy = "learner.zero_stage=3 gathers weights inside the blocks; use zero_stage=2, or set it to false"
        yield Problem(("learner", "compile_blocks"), remedy, True)


def _only_fixed_launches_are_recorded(config: RunConfig) -> Iterator[Problem]:
    if not config.placement.cuda_graphs:
        return
    if config.policy.temperature_end is not None:
        remedy = "policy.temperature_end changes the temperature, which a graph holds fixed; set it to false"
        yield Problem(("placement", "cuda_graphs"), remedy, True)
    if getattr(config.policy, "jpeg", None):
        remedy = "policy.jpeg=true compresses images on the host, which a graph cannot hold; set it to false"
        yield Problem(("placement", "cuda_graphs"), remedy, True)


def _chunk_fits_episode(config: RunConfig) -> Iterator[Problem]:
    steps, chunk = getattr(config.env, "max_episode_steps", None), config.policy.chunk_size
    if steps is not None and chunk > steps:
        remedy = f"an episode of env.max_episode_steps={steps} would end within the first chunk; use at most {steps}"
        yield Problem(("policy", "chunk_size"), remedy, chunk)


def _betas_below_one(config: RunConfig) -> Iterator[Problem]:
    if max(config.learner.betas) >= 1.0:
        yield Problem(("learner", "betas"), "AdamW needs both below 1, such as [0.9,0.95]", list(config.learner.betas))


def _only_sharded_state_is_offloaded(config: RunConfig) -> Iterator[Problem]:
    learner = config.learner
    for name, least in (("offload_optimizer", 1), ("offload_parameters", 3)):
        value = getattr(learner, name)
        if value != "none" and learner.zero_stage < least:
            needed = "3" if least == 3 else f"{least} or more"
            text = f"DeepSpeed does this under ZeRO only; set learner.zero_stage={needed}, not {learner.zero_stage}"
            yield Problem(("learner", name), text, value)


def _batch_holds_whole_groups(config: RunConfig) -> Iterator[Problem]:
    episodes, size = config.train.batch_episodes, config.algo.groups.size
    if episodes % size:
        remedy = f"a super-batch holds whole groups of algo.group_size={size}; use a multiple of it"
        yield Problem(("train", "batch_episodes"), remedy, episodes)


def _published_often_enough(config: RunConfig) -> Iterator[Problem]:
    every, bound = config.publish_every, max(0, config.max_first_staleness)
    if every > bound + 1:
        limits = f"train.max_staleness={config.train.max_staleness}"
        if config.train.reuse > 1:
            limits += f" with train.reuse={config.train.reuse}"
        remedy = f"update {bound + 2} would wait for fresher data than {limits} allows"
        yield Problem(("train", "publish_every"), f"{remedy}; use at most {bound + 1}", every)


def _old_enough_to_be_reused(config: RunConfig) -> Iterator[Problem]:
    reuse, bound = config.train.reuse, config.max_staleness
    if reuse > bound + 1:
        remedy = f"with train.max_staleness={bound} no episode is young enough for more than {bound + 1} updates"
        yield Problem(("train", "reuse"), f"{remedy}; raise train.max_staleness to {reuse - 1} or more", reuse)


def _reuse_is_corrected(config: RunConfig) -> Iterator[Problem]:
    if config.train.reuse > 1 and not config.algo.takes_stale_data:
        remedy = "an episode's later uses are off-policy, which algo.proximal=behaviour does not correct"
        yield Problem(("train", "reuse"), f"{remedy}; set algo.proximal=recomputed", config.train.reuse)


def _off_policy_fits_policy_and_rank(config: RunConfig) -> Iterator[Problem]:
    if not isinstance(config.algo, OffPolicyConfig):
        return
    policy = config.policy
    has = {"means": policy.regresses, "deviations": policy.draws_normal, "steering": policy.steered, "nothing": True}
    if policy.steered and config.algo.demos:
        remedy = "to memory and critic, the noise that policy.steer chooses is the action, and demonstrations lack it"
        yield Problem(("algo", "demos"), f"{remedy}; set it to []", list(config.algo.demos))
    if not has[config.algo.actor_needs]:
        yield Problem(("policy", "name"), _ACTORS[config.algo.actor_needs], policy.name)
    if config.learner.zero_stage:
        remedy = f"algo.name={config.algo.name} trains on one rank, which has nothing to shard; set it to 0"
        yield Problem(("learner", "zero_stage"), remedy, config.learner.zero_stage)
    if config.algo.critic_reads == "images" and (size := getattr(config.env, "image_size", 0)) % STRIDE:
        remedy = f"the critic divides images into patches; use a multiple of {STRIDE}, or algo.critic_reads=features"
        yield Problem(("env", "image_size"), remedy, size)
    if config.train.reuse > 1:
        remedy = "the replay memory keeps episodes already; set it to 1"
        yield Problem(("train", "reuse"), f"algo.name={config.algo.name}: {remedy}", config.train.reuse)


def _off_policy_alone_steers(config: RunConfig) -> Iterator[Problem]:
    if getattr(config.policy, "steer", None) is not None and not isinstance(config.algo, OffPolicyConfig):
        yield Problem(("policy", "steer"), f"algo.name={config.algo.name} does not train it; use algo=dsrl", "{...}")


def _reference_gives_no_state(config: RunConfig) -> Iterator[Problem]:
    if config.algo.reads_state and isinstance(config.env, LiberoConfig) and config.env.implementation == "reference":
        remedy = "gives no state to algo.critic_reads=state; use fast, or algo.critic_reads=images"
        yield Problem(("env", "implementation"), remedy, config.env.implementation)


def _imagined_chunks_are_used(config: RunConfig) -> Iterator[Problem]:
    if config.world_model is not None and not isinstance(config.algo, PolicyGradientConfig | OffPolicyConfig):
        remedy = f"algo.name={config.algo.name} has no use for imagined chunks; use ppo, grpo, rloo or td3_bc"
        yield Problem(("world_model",), f"{remedy}, or world_model=null", "{...}")


def _only_success_is_imagined(config: RunConfig) -> Iterator[Problem]:
    if config.world_model is None:
        return
    if isinstance(config.env, WorkloadConfig):
        yield Problem(("world_model",), "env=workload has no success to predict; set world_model=null", "{...}")
    if config.env.shaping:
        remedy = "the world model predicts success, not shaped rewards; set it to 0, or world_model=null"
        yield Problem(("env", "shaping"), remedy, config.env.shaping)


def _only_workload_is_virtual(config: RunConfig) -> Iterator[Problem]:
    virtual = config.placement.virtual
    if virtual is not None and not isinstance(config.env, WorkloadConfig):
        remedy = "virtual devices compute nothing: only env=workload runs on them"
        yield Problem(("placement", "virtual"), remedy, virtual)


def _replanning_needs_auto(config: RunConfig) -> Iterator[Problem]:
    every, mode = config.placement.replan_every, config.placement.mode
    if every and mode != "auto":
        remedy = f"replanning chooses among all modes, and placement.mode={mode} fixes one; use 0, or mode=auto"
        yield Problem(("placement", "replan_every"), remedy, every)


def _nodes_need_a_cluster(config: RunConfig) -> Iterator[Problem]:
    p = config.placement
    for name, count, alone in (("nodes", p.nodes, 1), ("env_hosts", p.env_hosts.max, 0)):
        key = ("placement", name)
        if count > alone and p.ray_address is None:
            yield Problem(key, "several machines need a running Ray cluster; set placement.ray_address", count)
        if count > alone and p.virtual is not None:
            yield Problem(key, f"virtual devices are all on this machine; use {alone}", count)


def _address_has_a_form(config: RunConfig) -> Iterator[Problem]:
    address = config.placement.ray_address
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or any(c.isspace() or c == "/" for c in host):
        yield Problem(("placement", "ray_address"), "write HOST:PORT of a running Ray cluster, auto, or null", address)


def _name_is_of_a_folder(config: RunConfig) -> Iterator[Problem]:
    name = config.log.name
    if name is None:
        return
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        yield Problem(("log", "name"), "is the name of one folder within log.dir, without slashes", name)
    elif len(name.encode()) > _LONGEST_NAME:
        yield Problem(("log", "name"), f"has {len(name.encode())} bytes; use at most {_LONGEST_NAME}", name)
