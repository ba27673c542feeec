"""What a run asks of the machine that it runs on."""

from dataclasses import dataclass
from typing import Self

from algos.config import UpdateWork
from vla_rl.config.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run asks of the machine."""

    episodes: int  # new real ones, of a super-batch
    branches: int  # imagined chunks for each of their chunks; 0: there is no world model
    reuse: int  # super-batches that hold an episode
    horizon: int  # time limit of an episode, in control steps
    spread: float  # episodes last horizon * (1 - u * spread) steps, u uniform in 0..1
    chunk_size: int
    micro_batch: int
    update: UpdateWork
    max_staleness: int  # where an episode is first trained
    publish_every: int  # updates
    max_wait: float  # seconds that an inference request may wait for others
    row_bytes: int = 0  # of a request, on the way to an inference server of another node

    @classmethod
    def of(cls, config: RunConfig, horizon: int, spread: float) -> Self:
        return cls(
            episodes=config.train.batch_episodes,
            branches=0 if config.world_model is None else config.world_model.branches,
            reuse=config.train.reuse,
            horizon=horizon,
            spread=spread,
            chunk_size=config.policy.chunk_size,
            micro_batch=config.learner.micro_batch,
            update=config.algo.work(config.policy.chunk_size),
            max_staleness=config.max_first_staleness,
            publish_every=config.publish_every,
            max_wait=config.placement.max_wait_ms * 1e-3,
        )

    @property
    def steps(self) -> float:
        """Mean number of control steps in the new episodes of a super-batch."""
        return self.episodes * self.horizon * (1 - self.spread / 2)

    @property
    def chunks(self) -> float:
        """Mean number of chunks in the new episodes; one that ends early leaves half a chunk unused on average."""
        return self.episodes * (self.horizon * (1 - self.spread / 2) / self.chunk_size + 0.5 * (self.spread > 0))

    @property
    def trained_per_chunk(self) -> int:
        """Chunks on which an update trains for each new real one: also those used again, and imagined ones."""
        return self.reuse + self.branches
