"""Checks of a config against a machine: what a run needs and the machine lacks."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envs import env_spec
from envs.base.lerobot_format import missing_packages
from envs.maniskill.config import ManiSkillConfig
from vla_rl.config.checks import Check
from vla_rl.config.loading import Source, load_config
from vla_rl.config.messages import Problem
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.hub import RepoType, download, hub_address_problem, is_hub_address
from vla_rl.core.machine import GIB, Machine, multiplies_bf16
from vla_rl.placement.host_memory import WORKER_BYTES
from vla_rl.placement.plan import PlanError
from vla_rl.placement.processes import make_plan
from vla_rl.placement.profile import load_profile
from vla_rl.placement.resources import Resources
from vla_rl.policies.base.hub import is_hub_id
from vla_rl.policies.build import keys_of_checkpoint

_ON_THE_HUB: dict[str, RepoType] = {  # keys that may be addresses there
    "policy.checkpoint": "model",
    "sft.start_from": "model",
    "sft.demos": "dataset",
    "algo.bc_demos": "dataset",
    "algo.demos": "dataset",
}


def load_checked_config(
    source: Source, overrides: Sequence[str] | Mapping[str, Any] = (), checks: Sequence[Check] | None = None
) -> RunConfig:
    """Load a config that must be able to run, and download what it names on the hub.

    ``checks``: of the machine where it runs; by default ``machine_checks`` of this one.
    Keys that follow from the policy's checkpoint are set so, unless the config says otherwise. Raises ConfigError, as
    ``load_config`` does, and UserError if something cannot be downloaded.
    """
    checks = machine_checks(Machine.detect()) if checks is None else checks
    return with_keys_of_checkpoint(with_downloads(load_config(source, overrides, checks)))


def with_downloads(config: RunConfig) -> RunConfig:
    """The config with local copies in place of addresses on the hub. Raises UserError."""
    values: dict[str, Any] = {}
    for key, repo_type in _ON_THE_HUB.items():
        group, name = key.split(".")
        named: Any = getattr(getattr(config, group), name, ())  # not every algorithm clones
        if is_hub_address(named):
            values[key] = str(download(named, repo_type))
        elif isinstance(named, tuple) and any(map(is_hub_address, named)):
            values[key] = tuple(str(download(x, repo_type)) if is_hub_address(x) else x for x in named)
    return config.with_values(values)


def with_keys_of_checkpoint(config: RunConfig) -> RunConfig:
    """The config with the keys that follow from the policy's checkpoint, or its server, such as the observations that
    it reads, where the config does not give them.

    A checkpoint that cannot be read changes nothing: ``check_policy`` tells what is wrong with it.
    """
    checkpoint = config.policy.checkpoint
    if is_hub_id(checkpoint) if checkpoint else not config.policy.elsewhere:
        return config
    try:
        found = keys_of_checkpoint(config.policy, env_spec(config.env))
    except UserError:
        return config
    groups = {name: getattr(config, name) for name in ("env", "policy")}
    free = {f"{name}.{key}" for name, g in groups.items() for key in type(g).model_fields.keys() - g.model_fields_set}
    return config.with_values({key: value for key, value in found.items() if key in free})


def checks_elsewhere() -> tuple[Check, ...]:
    """Checks for ``load_config`` of what can be told without the machine that runs it."""
    return (
        Check((("policy", "checkpoint"),), _checkpoint_exists),
        Check((("algo", "demos"), ("algo", "bc_demos")), _demonstrations_exist),
        Check(tuple((group, name) for group, name in (key.split(".") for key in _ON_THE_HUB)), _addresses_have_a_form),
        Check((("placement", "profile"), ("placement", "virtual")), _profiles_can_be_read),
    )


def machine_checks(machine: Machine) -> tuple[Check, ...]:
    """Checks for ``load_config``: what ``machine`` must have for the run."""
    return (
        *checks_elsewhere(),
        Check((("placement",), ("env",), ("learner",)), lambda config: _plan_exists(config, machine)),
        Check((("env",),), lambda config: _simulator_has_gpu(config, machine)),
        Check((("placement",),), lambda config: _processes_fit(config, machine)),
        Check((("placement", "compile_blocks"),), partial(_compiler_exists, "placement", machine)),
        Check((("learner", "compile_blocks"),), partial(_compiler_exists, "learner", machine)),
        Check((("learner", "matmul"),), partial(_processor_has_bf16, machine)),
        Check((("placement", "cuda_graphs"),), lambda config: _graphs_have_a_gpu(config, machine)),
        Check((("log", "dataset"),), _dataset_can_be_written),
        Check((("log", "wandb"),), _wandb_has_a_key),
    )


def _checkpoint_exists(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.policy.checkpoint
    if checkpoint is None or is_hub_address(checkpoint) or is_hub_id(checkpoint):
        return
    try:
        folder = Path(checkpoint).expanduser().absolute()
        found = folder.is_dir()
    except (RuntimeError, OSError) as error:  # the home of a user who does not exist; a name that is too long
        yield Problem(("policy", "checkpoint"), f"{str(error)[:100]}; name the folder of a checkpoint", checkpoint)
        return
    if not found:
        what = "is not a folder" if folder.exists() else "does not exist"
        text = f"{folder} {what}; name the folder of a checkpoint, or null to start from random weights"
        yield Problem(("policy", "checkpoint"), text, checkpoint)


def _demonstrations_exist(config: RunConfig) -> Iterator[Problem]:
    for name in ("demos", "bc_demos"):
        for value in getattr(config.algo, name, ()):  # not every algorithm reads any
            if not is_hub_address(value) and not os.path.exists(value):
                text = f"{value} does not exist; name files or folders of demonstrations that `vla-rl inspect` reads"
                yield Problem(("algo", name), text, value)


def _addresses_have_a_form(config: RunConfig) -> Iterator[Problem]:
    for key in _ON_THE_HUB:
        group, name = key.split(".")
        named = getattr(getattr(config, group), name, ())  # not every algorithm clones
        for value in named if isinstance(named, tuple) else (named,):
            if is_hub_address(value) and (text := hub_address_problem(value)):
                yield Problem((group, name), text, value)


def _processor_has_bf16(machine: Machine, config: RunConfig) -> Iterator[Problem]:
    if config.learner.matmul == "bf16" and not machine.gpus and not multiplies_bf16():
        text = "this processor has no AMX for bfloat16, which it takes without a GPU; use fp32"
        yield Problem(("learner", "matmul"), text, "bf16")


def _dataset_can_be_written(config: RunConfig) -> Iterator[Problem]:
    if config.log.dataset is not None and (missing := missing_packages()):
        text = f"needs {', '.join(missing)}: pip install {' '.join(missing)}, or set it to null"
        yield Problem(("log", "dataset"), text, config.log.dataset)


def _wandb_has_a_key(config: RunConfig) -> Iterator[Problem]:
    key, offline = ("log", "wandb"), "use offline and `wandb sync` later"
    if config.log.wandb != "off" and find_spec("wandb") is None:
        yield Problem(key, "needs wandb: pip install wandb, or set it to off", config.log.wandb)
        return
    if config.log.wandb != "online":
        return
    import wandb

    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        yield Problem(key, f"contradicts WANDB_MODE={mode} of the environment: unset that, or {offline}", "online")
        return
    wandb.setup(settings=wandb.Settings(silent=True))  # else a login asks the server for the user's name, to print it
    try:
        if not wandb.login(prompt=False, verify=False):  # without a network, the run logs offline
            text = f"finds no key of W&B: call `wandb login`, set WANDB_API_KEY, or {offline}"
            yield Problem(key, text, "online")
    except wandb.Error as error:
        yield Problem(key, f"{error} Call `wandb login`, correct the key, or {offline}", "online")


def _plan_exists(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    try:
        plan = make_plan(config, Resources.of(machine, config))
    except PlanError as error:
        group, name = error.key.split(".")
        yield Problem((group, name), error.text, getattr(getattr(config, group), name))
        return
    hosts = config.placement.env_hosts
    if idle := hosts.max - len(plan.env_hosts):
        text = f"{idle} of at most {hosts.max} hosts have no env worker: raise placement.env_workers, or lower max"
        yield Problem(("placement", "env_hosts"), text, hosts.max)


def _simulator_has_gpu(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    env = config.env
    if isinstance(env, ManiSkillConfig) and env.backend == "physx_cuda" and not machine.gpus:
        yield Problem(("env", "backend"), "torch can use no NVIDIA GPU here; use physx_cpu", env.backend)


def _processes_fit(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    placement = config.placement
    needed = placement.env_workers / (placement.nodes + placement.env_hosts.max) * WORKER_BYTES
    if needed > machine.memory:
        text = (
            f"so many processes take {needed / GIB:.0f} GiB of memory at least, and this machine has "
            f"{machine.memory / GIB:.0f}; use fewer, with more placement.envs_per_worker"
        )
        yield Problem(("placement", "env_workers"), text, placement.env_workers)


def _compiler_exists(group: str, machine: Machine, config: RunConfig) -> Iterator[Problem]:
    if not getattr(config, group).compile_blocks:
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")):
        text = "torch.compile needs a C++ compiler, and there is neither g++ nor clang++; install one, or use false"
        yield Problem((group, "compile_blocks"), text, True)
    elif machine.gpus and find_spec("triton") is None:
        text = "torch.compile needs triton on a GPU; pip install triton, or use false"
        yield Problem((group, "compile_blocks"), text, True)


def _graphs_have_a_gpu(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if config.placement.cuda_graphs and not machine.gpus:
        yield Problem(("placement", "cuda_graphs"), "torch can use no NVIDIA GPU here; set it to false", True)


def _profiles_can_be_read(config: RunConfig) -> Iterator[Problem]:
    for name in ("profile", "virtual"):
        path = getattr(config.placement, name)
        try:
            if path is not None:
                load_profile(Path(path))
        except UserError as error:
            yield Problem(("placement", name), str(error), path)
