"""How an evaluation episode ended: success, or a kind of failure."""

import math

from vla_rl.core.records import EpisodeResult

SET_ASIDE = "set_aside"
FAILURES = {
    "ended": "the simulator ended the episode as a failure",
    "no_progress": "time limit; less than half of the way was made (LIBERO: no object of the goal was held)",
    "progress_lost": "time limit; progress was made and lost (LIBERO: an object of the goal was held, then released)",
    "on_the_way": "time limit, more than half of the way from the start (LIBERO: an object of the goal was still held)",
    "time_limit": "time limit; this simulator does not measure progress",
    SET_ASIDE: "not a failure, and not counted: the simulator died each time; the same command plays it again",
}
_SHORT = {  # in a film's caption
    "ended": "failure: ended by the simulator",
    "no_progress": "failure: time limit, no progress",
    "progress_lost": "failure: time limit, progress lost",
    "on_the_way": "failure: time limit, on the way",
    "time_limit": "failure: time limit",
    SET_ASIDE: "set aside: the simulator died",
}
_HALF = 0.5


def failure_kind(result: EpisodeResult) -> str | None:
    """One of ``FAILURES``; None for a success. Progress is seen after each chunk."""
    if result.success:
        return None
    if result.set_aside:
        return SET_ASIDE
    if result.terminated:
        return "ended"
    if math.isnan(result.best_progress):
        return "time_limit"
    if result.best_progress < _HALF:
        return "no_progress"
    return "on_the_way" if result.final_progress >= _HALF else "progress_lost"


def verdict(result: EpisodeResult) -> str:
    """The same in a few words, such as ``failure: time limit``."""
    kind = failure_kind(result)
    return "success" if kind is None else _SHORT[kind]
