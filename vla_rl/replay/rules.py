"""What the replay store needs to know about a run."""

from dataclasses import dataclass, field
from typing import Self

from vla_rl.config.run_config import RunConfig
from vla_rl.core.records import EnvSpec, GroupRules
from vla_rl.replay.schedule import TaskRule


@dataclass(frozen=True, slots=True)
class StoreRules:
    """Counts of episodes, bounds on their staleness, and what they start from."""

    batch_episodes: int  # B, a multiple of the group size
    max_staleness: int  # policy updates
    drop_stale: bool = field(default=True, kw_only=True)  # False: it bounds what is started, and nothing is dropped
    reuse: int = field(default=1, kw_only=True)  # super-batches that hold an episode
    num_tasks: int
    max_episode_steps: int
    seed: int
    iterations: int  # policy updates of the run; no episode is started for a later one
    groups: GroupRules = field(default_factory=GroupRules)
    task_rule: TaskRule = "in_turn"
    init_states: int | None = None  # benchmark initial states to start from; None: the simulator samples starts
    branches: int = field(default=0, kw_only=True)  # imagined episodes for each real chunk; 0: there is no world model

    @property
    def max_first_staleness(self) -> int:
        """The bound on staleness where an episode is first trained, so that it can be used ``reuse`` times."""
        return self.max_staleness - (self.reuse - 1)

    @classmethod
    def of(cls, config: RunConfig, spec: EnvSpec) -> Self:
        """The rules of a training run."""
        train = config.train
        return cls(
            batch_episodes=train.batch_episodes,
            max_staleness=config.max_staleness,
            drop_stale=not config.algo.remembers,
            reuse=train.reuse,
            num_tasks=len(spec.instructions),
            max_episode_steps=spec.max_episode_steps,
            seed=config.seed,
            iterations=train.iterations,
            groups=config.algo.groups,
            task_rule=train.task_sampling,
            init_states=spec.init_states if train.start_states == "benchmark" else None,
            branches=0 if config.world_model is None else config.world_model.branches,
        )
