"""Machines that are not here: what ``vla-rl plan CONFIG --on MACHINES`` plans for.

    2x8xH100:128cpu+16x64cpu    2 nodes of 8 H100 and 128 cores each, and 16 hosts of 64 cores without a GPU

After a colon stands what is known of each node: its cores (``128cpu``), main memory (``1024gib``), the rate of its link
(``100gbit``) and the link's delay (``0.1ms``). What is not known is assumed, and said to be.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import env_spec
from vla_rl.config.loading import Source
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.gpus import Gpu
from vla_rl.core.machine import GIB, Machine
from vla_rl.core.records import EnvSpec
from vla_rl.core.shipped import CONFIGS
from vla_rl.placement.checks import checks_elsewhere, load_checked_config
from vla_rl.placement.planner import with_env_workers
from vla_rl.placement.profile import Profile, load_profile
from vla_rl.placement.resources import Link, Node, Resources

_TERM = re.compile(
    r"(?:(\d+)x)?(?:(\d+)x([a-z]\w*)|(\d+)cpu)((?::(?:\d+cpu|\d+(?:\.\d+)?(?:gib|gbit|ms)))*)", re.IGNORECASE
)
_CORES = 16  # of a node, for each of its GPUs, an assumption
_MEMORY = 8  # GiB for each core, an assumption
_MOST = 1000  # nodes, and GPUs
_OF_A_MACHINE = {  # keys by which a config divides the machine that it was written for
    "placement.mode": "auto",
    "placement.devices": None,
    "placement.simulator_devices": None,
    "placement.inference_devices": None,
}


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Machines that are alike."""

    count: int
    gpu: str | None  # the kind of its devices; None: it has none
    node: Node
    assumed: frozenset[str]  # by unit: which of the node's numbers nobody has given

    def describe(self, gpu_memory: float) -> str:
        """Such as ``8 H100 of 80 GiB, 128 cores, 1024 GiB of main memory (assumed), a link of ...``."""
        node = self.node
        numbers = {
            "cpu": f"{node.cores} cores",
            "gib": f"{node.memory:.0f} GiB of main memory",
            "gbit": f"a link of {node.link.rate * 8e-9:g} Gbit/s",
            "ms": f"its delay {node.link.delay * 1e3:g} ms",
        }
        devices = [f"{node.devices} {self.gpu} of {gpu_memory:.0f} GiB"] if node.devices else []
        known = [f"{text} (assumed)" if unit in self.assumed else text for unit, text in numbers.items()]
        return ", ".join((*devices, *known))


@dataclass(frozen=True, slots=True)
class Site:
    """What a plan is for: a run's config and simulator, a node with devices, all nodes, and remarks on them."""

    config: RunConfig
    spec: EnvSpec
    machine: Machine
    resources: Resources
    notes: tuple[str, ...] = ()


def elsewhere(machines: str, source: Source, overrides: Sequence[str]) -> Site:
    """The site that ``--on`` describes, with the profile of its GPUs.

    Keys that divide a machine are left free for the planner, unless ``overrides`` give them; so is the number of env
    workers. Raises UserError, and ConfigError as ``load_config`` does.
    """
    kinds = parse_machines(machines)
    config = load_checked_config(source, overrides, checks_elsewhere())
    if config.placement.virtual is not None:
        raise UserError(f"--on {machines}: placement.virtual has devices of its own; set placement.virtual=null")
    gpu = kinds[0].gpu
    assert gpu is not None
    file, profile = profile_for(gpu, config)
    given = {override.split("=")[0] for override in overrides}
    free = {key: value for key, value in _OF_A_MACHINE.items() if not given & {key, "placement"}}
    config = config.with_values(free | {"placement.profile": file})
    nodes = tuple(kind.node for kind in kinds for _ in range(kind.count))
    resources, gpu_memory = Resources.on(nodes, "cuda"), profile.memory.device
    gpus = (Gpu(gpu, int(gpu_memory * GIB)),) * nodes[0].devices
    machine, spec = Machine(nodes[0].cores, int(nodes[0].memory * GIB), gpus), env_spec(config.env)
    notes = [f"{kind.count} x {kind.describe(gpu_memory)}" for kind in kinds]
    if not given & {"placement.env_workers", "placement"}:
        config = with_env_workers(config, spec, machine, resources)
        notes.append(f"placement.env_workers={config.placement.env_workers}, chosen for these machines")
    if profile.gpu is None:
        notes.append(f"{file} does not name its GPU: {gpu} (assumed)")
    return Site(config, spec, machine, resources, tuple(notes))


def parse_machines(text: str) -> tuple[NodeKind, ...]:
    """The kinds of nodes that ``--on`` names, those with GPUs first. Raises UserError."""
    kinds = [_parse_term(term.strip(), text) for term in text.split("+")]
    gpus = sorted({kind.gpu.upper() for kind in kinds if kind.gpu})
    if not gpus:
        raise _refusal(text, "none of these nodes has a GPU, and learner and inference need some")
    if len(gpus) > 1:
        raise _refusal(text, f"a plan has one kind of GPU, and these are {' and '.join(gpus)}")
    if max(sum(kind.count for kind in kinds), sum(kind.count * kind.node.devices for kind in kinds)) > _MOST:
        raise _refusal(text, f"more than {_MOST} nodes or GPUs")
    return tuple(sorted(kinds, key=lambda kind: kind.gpu is None))


def _parse_term(term: str, text: str) -> NodeKind:
    match = _TERM.fullmatch(term)
    if match is None:
        raise _refusal(text, f"{term!r} is neither GPUS x KIND nor CORES cpu")
    count, gpus, gpu, cores, extras = match.groups()
    given: dict[str, float] = {} if cores is None else {"cpu": float(cores)}
    for number, unit in re.findall(r":([\d.]+)([a-z]+)", extras.lower()):
        if unit in given:
            raise _refusal(text, f"{term!r} gives {unit} twice")
        given[unit] = float(number)
    if 0 in (int(count or 1), int(gpus or 1), *given.values()):
        raise _refusal(text, f"{term!r} has a 0")
    devices = int(gpus or 0)
    each, link = int(given.get("cpu", _CORES * devices)), Link()
    rate = given["gbit"] * 1e9 / 8 if "gbit" in given else link.rate
    delay = given["ms"] * 1e-3 if "ms" in given else link.delay
    node = Node(each, devices, given.get("gib", _MEMORY * each), Link(rate, delay))
    return NodeKind(int(count or 1), gpu, node, frozenset({"cpu", "gib", "gbit", "ms"} - given.keys()))


def _refusal(text: str, problem: str) -> UserError:
    example = "2x8xH100:128cpu+16x64cpu: 2 nodes of 8 H100 and 128 cores, 16 hosts of 64 cores"
    return UserError(f"--on {text}: {problem}; write such as {example}")


def profile_for(gpu: str, config: RunConfig) -> tuple[str, Profile]:
    """(file, profile) of this kind of GPU: ``placement.profile``, else the shipped one that fits the run.

    Raises UserError, with what there is, if there is none.
    """
    if (named := config.placement.profile) is not None:
        profile = load_profile(Path(named))
        if profile.gpu is not None and profile.gpu.casefold() != gpu.casefold():
            raise UserError(f"--on: placement.profile={named} is of {profile.gpu}, not of {gpu}; set it to null")
        return named, profile
    shipped = {path: load_profile(path) for path in sorted((CONFIGS / "profiles").glob("*.yaml"))}
    remedy = "measure one with `vla-rl profile` where such a GPU is, and set placement.profile=FILE"
    known = sorted({profile.gpu for profile in shipped.values() if profile.gpu})
    alike = {path: profile for path, profile in shipped.items() if (profile.gpu or "").casefold() == gpu.casefold()}
    if not alike:
        raise UserError(f"--on: there is no profile of {gpu}, only of {', '.join(known)}; {remedy}")
    for path, profile in alike.items():
        if all(_value(config, key) == value for key, value in profile.fits.items()):
            return str(path), profile
    wanted = [
        f"{path.stem} is for {' '.join(f'{k}={v}' for k, v in profile.fits.items())}" for path, profile in alike.items()
    ]
    raise UserError(f"--on: no profile of {gpu} fits this run ({'; '.join(wanted)}); {remedy}")


def _value(config: RunConfig, key: str) -> str:
    """A key's value as text; "None" if this kind of simulator or policy does not have the key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return str(value)
