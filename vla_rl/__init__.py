"""vla_rl: asynchronous actor-learner reinforcement learning of vision-language-action (VLA) robot policies.

    EnvWorker ◀──actions──▶ InferenceServer        rollout/   env workers play episodes in simulators
        │ trajectories            ▲ weights         inference/ servers answer observations in batches
        ▼                         │                 replay/    finished episodes wait, and become super-batches
    ReplayStore ──super-batch──▶ Learner            learner/   DeepSpeed ranks update the policy

    commands/       what the command `vla-rl` does: train (the main loop), evaluate, sft, study, plan, benchmark, ...
    cluster/        starts and supervises the boxes as Ray actors; the only room that knows Ray
    placement/      decides what runs on which device, from the configuration and measured costs
    config/         the schema of a run, and reading it from YAML files and overrides
    policies/       OpenVLA-OFT: model, action codec, prompt, images, LoRA, checkpoints
    observability/  meters, rates, the terminal view, plots, films, pages
    core/           records, errors, shared memory, device leases: what every room may import

Simulators are in ``envs``, algorithms in ``algos``. From Python: ``vla_rl.train(vla_rl.load_config("tabletop"))``
(docs/api.md).
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.commands.api import (
        LoadedPolicy,
        evaluate,
        export,
        load_config,
        load_policy,
        register_envs,
        report,
        sft,
        train,
    )
    from vla_rl.commands.sft import SftResult
    from vla_rl.config.messages import ConfigError
    from vla_rl.config.run_config import RunConfig
    from vla_rl.core.errors import RunError, UserError
    from vla_rl.observability.callbacks import Callback, TrainResult
    from vla_rl.observability.success_rate import Evaluation

__all__ = [
    "Callback",
    "ConfigError",
    "Evaluation",
    "LoadedPolicy",
    "RunConfig",
    "RunError",
    "SftResult",
    "TrainResult",
    "UserError",
    "evaluate",
    "export",
    "load_config",
    "load_policy",
    "register_envs",
    "report",
    "sft",
    "train",
]
_HOMES = {
    "Callback": "observability.callbacks",
    "ConfigError": "config.messages",
    "Evaluation": "observability.success_rate",
    "RunConfig": "config.run_config",
    "RunError": "core.errors",
    "SftResult": "commands.sft",
    "TrainResult": "observability.callbacks",
    "UserError": "core.errors",
}


def _require_own_packages() -> None:
    """Raise ImportError if another distribution's package has the name of one of ours; there is one named ``envs``."""
    home = Path(__file__).resolve().parents[1]
    for name, file in (("envs", "base/vector_env.py"), ("algos", "algorithm.py")):
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found is None or found.parent != home / name or not (home / name / file).is_file():
            where = found.parent if found is not None else "missing"
            raise ImportError(
                f"vla_rl brings a package named {name!r} ({home / name}), and Python finds another one ({where}): "
                f"uninstall the other one (`pip uninstall {name}`) and install vla_rl again, or, if a folder of your "
                "own has that name, start elsewhere or rename it"
            )


class _IdsForGymnasium(MetaPathFinder):
    """Registers ``vla_rl/Tabletop-v0`` and the others as soon as gymnasium is imported, which this package does not."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path) if fullname == "gymnasium" else None
        if found is not None and found.loader is not None:
            loader: Any = found.loader
            load = loader.exec_module
            loader.exec_module = lambda module: (load(module), import_module("envs.gymnasium.registration"))
        return found


_require_own_packages()
if "gymnasium" in sys.modules:
    import_module("envs.gymnasium.registration")
else:
    sys.meta_path.insert(0, _IdsForGymnasium())


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: ``import vla_rl`` loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"vla_rl.{_HOMES.get(name, 'commands.api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
