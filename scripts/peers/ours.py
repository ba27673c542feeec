"""This project: `vla-rl train` of the config, asynchronous PPO, without evaluations.

Steps count that were learned from or that were played, whichever are fewer: what lay in queues before is no gain.
"""

import shutil
from collections.abc import Mapping

import vla_rl
from peers.setting import line, read_setting
from vla_rl.observability.callbacks import Callback

WARM_UP = 2  # iterations, which begin with empty queues


class UntilTime(Callback):
    """Ends the run after so many seconds; the warm-up does not count."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.measured = seconds, list[Mapping[str, float]]()

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        if iteration > WARM_UP:
            self.measured.append(dict(metrics))
        return iteration > WARM_UP and sum(m["time/iteration_s"] for m in self.measured) >= self._seconds


def main() -> None:
    setting = read_setting()
    until = UntilTime(setting.seconds)
    quiet = {"train.eval_episodes": 0, "train.checkpoint_every": 10**6, "log.tensorboard": False, "log.video": False}
    endless = {"train.iterations": 10**6, "train.max_minutes": None, "log.dir": str(setting.folder)}
    vla_rl.train(setting.config, quiet | endless, callbacks=[until])
    shutil.rmtree(setting.folder)
    if not until.measured:
        raise KeyboardInterrupt  # which the run takes for a wish to stop with a checkpoint
    names = ("rollout/chunks", "rollout/env_steps", "time/iteration_s")
    chunks, learned, seconds = (sum(m[name] for m in until.measured) for name in names)
    played = sum(m["throughput/env_steps_per_s"] * m["time/iteration_s"] for m in until.measured)
    line("vla_rl", setting.simulator, len(until.measured), int(chunks), int(min(learned, played)), seconds)


if __name__ == "__main__":
    main()
