"""The learner that a run's algorithm needs."""

from dataclasses import replace
from pathlib import Path

from algos import make_algorithm
from algos.algorithm import Algorithm
from algos.off_policy import GradientAlgorithm
from envs.base.demonstration_records import DemonstrationError, Demonstrations
from envs.base.demonstrations import demonstrations_for
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices.lock import DeviceLease
from vla_rl.core.errors import UserError
from vla_rl.core.records import EnvSpec
from vla_rl.learner.anchors import Anchors, anchors_of_demonstrations
from vla_rl.learner.choice_learner import ChoiceLearner
from vla_rl.learner.gradient_learner import GradientLearner
from vla_rl.learner.learner import Learner
from vla_rl.learner.off_policy import OffPolicyLearner
from vla_rl.policies.base.policy import Policy


def make_learner(
    config: RunConfig, policy: Policy, spec: EnvSpec, *, rank: int, world_size: int, device: str, lease: DeviceLease
) -> Learner | OffPolicyLearner:
    """One rank of it. ``join_ranks`` comes first. Raises UserError if demonstrations or a checkpoint do not fit."""
    algorithm = make_algorithm(config.algo)
    if not isinstance(algorithm, Algorithm):
        paths = [Path(path) for path in algorithm.config.demos]
        demos = demonstrations_for(spec, paths, config.demos) if paths else None
        if demos is not None:
            demos = _as_the_critic_reads(demos, spec, reads_state=algorithm.config.reads_state)
        kind = GradientLearner if isinstance(algorithm, GradientAlgorithm) else ChoiceLearner
        return kind(config, policy, algorithm, spec, device=device, lease=lease, demos=demos)
    if config.policy.steered:
        raise UserError(
            f"policy.checkpoint={config.policy.checkpoint} has a network that chooses its noise, which "
            f"algo.name={config.algo.name} does not train: use algo=dsrl, or a copy of it without steering.safetensors"
        )
    c, anchors = algorithm.config, None
    if c.bc_coef:
        paths, chunk_size = [Path(path) for path in c.bc_demos], config.policy.chunk_size
        shown = anchors_of_demonstrations(paths, config.demos, spec, policy, chunk_size) if paths else None
        anchors = Anchors(shown, memory=0 if paths and c.teacher is None else c.bc_memory)
    ranks = {"rank": rank, "world_size": world_size}
    return Learner(config, policy, algorithm, **ranks, device=device, lease=lease, anchors=anchors)


def _as_the_critic_reads(demos: Demonstrations, spec: EnvSpec, *, reads_state: bool) -> Demonstrations:
    """With the simulator's state, if the critic reads it, and without it otherwise, as played episodes are."""
    if not reads_state:
        return replace(demos, state=None)
    if demos.state is None or demos.state.shape[1] != spec.state_dim:
        raise DemonstrationError(
            f"algo.critic_reads=state, and not all of algo.demos hold the {spec.state_dim} numbers of the state of "
            f"env.name={spec.name}: take those that the simulator's own expert plays (vla-rl sft records them), or use "
            "algo.critic_reads=features"
        )
    return demos
