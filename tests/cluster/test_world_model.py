"""The world model's process: an error with a real episode must end it, since nobody waits for ``observe``."""

from pathlib import Path

from tests.runtime_fakes import SPEC, trajectory
from vla_rl.cluster.processes.world_model import WorldModelProcess
from vla_rl.config.run_config import RunConfig
from vla_rl.core.records import EpisodeSpec
from vla_rl.placement.plan import Process


class Imagination:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.stopped = False

    def observe(self, played) -> None:
        if played.episode.id == 1:
            raise ArithmeticError("broken")
        self.seen.append(played.episode.id)

    def stop(self) -> None:
        self.stopped = True


def test_an_error_with_a_real_episode_is_kept_and_stops_imagination(tmp_path: Path):
    process = WorldModelProcess(RunConfig(), SPEC, Process("world model", 0, "cpu", (), 1, None), tmp_path)
    process._imagination = imagination = Imagination()
    for number in range(3):
        process.observe(trajectory(EpisodeSpec(number, 0, 0)))
    process._observe_all()
    assert imagination.seen == [0]
    assert imagination.stopped
    assert isinstance(process._failure, ArithmeticError), "run() raises it"


def test_stop_ends_the_thread_that_observes(tmp_path: Path):
    process = WorldModelProcess(RunConfig(), SPEC, Process("world model", 0, "cpu", (), 1, None), tmp_path)
    process._imagination = imagination = Imagination()
    process.observe(trajectory(EpisodeSpec(0, 0, 0)))
    process.stop()
    process._observe_all()
    assert imagination.seen == [0]
    assert process._failure is None
