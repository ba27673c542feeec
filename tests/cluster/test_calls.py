"""vla_rl.cluster.calls: waiting for remote calls, with Ray replaced by calls that have all ended."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from tests.learner.learner_tools import SPEC
from vla_rl.cluster import calls
from vla_rl.cluster.cluster import Cluster
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources
from vla_rl.replay.rules import StoreRules


class Watched:
    """Its ``look`` waits for a call of its own, as the replacement of an inference server does."""

    def __init__(self) -> None:
        self.loops, self.ended, self._nested = ["loop"], list[str](), False

    def loop_ended(self, ref: Any) -> None:
        self.loops.remove(ref)
        self.ended.append(ref)

    def look(self) -> None:
        if not self._nested:
            self._nested = True
            calls.gather(["inner"], "the inner call", 5.0, self)


def test_a_loop_that_ends_while_two_calls_are_waited_for_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.ray, "wait", lambda refs, **_: ([refs[-1]], refs[:-1]))  # the loop first, if it is open
    monkeypatch.setattr(calls.ray, "get", lambda refs: refs)
    watch = Watched()
    assert calls.gather(["outer"], "the outer call", 5.0, watch) == ["outer"]
    assert watch.ended == ["loop"]


def _cluster(monkeypatch: pytest.MonkeyPatch, *dead: str) -> Any:
    """One with calls that have ended because their processes have died."""
    config = RunConfig.model_validate({"env": {"name": "workload"}})
    rules = StoreRules.of(config, SPEC)
    cluster: Any = Cluster(config, make_plan(config, Resources(2, 1, "cpu")), SPEC, rules)
    cluster._vital, cluster._store_stays = {"learner stays": "learner 0", "store stays": "replay store"}, "store stays"
    cluster.look = lambda: None
    cluster._session = SimpleNamespace(require_ray=lambda: None)

    def get(refs: Any) -> Any:
        if refs in dead:
            raise RayActorError
        return refs

    monkeypatch.setattr(calls.ray, "wait", lambda refs, **_: ([ref for ref in refs if ref in dead], refs))
    monkeypatch.setattr(calls.ray, "get", get)
    return cluster


def test_the_death_of_a_learner_is_seen_while_something_else_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a new inference server, on a node that is gone as a whole."""
    cluster = _cluster(monkeypatch, "learner stays")
    for _ in range(2):  # also by whoever goes on in spite of it
        with pytest.raises(calls.ProcessDied, match="the learner 0 died: The actor experienced an error"):
            cluster.get("build", "a new inference server", 600.0)


def test_a_store_is_replaced_alone_if_nothing_else_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = _cluster(monkeypatch, "store stays", "call")
    with pytest.raises(calls.StoreLost, match="the replay store died: a process died"), alone.asking_store():
        alone.get("call", "the next super-batch", 60.0)
    both = _cluster(monkeypatch, "store stays", "learner stays", "call")
    with pytest.raises(calls.ProcessDied) as error, both.asking_store():
        both.get("call", "the next super-batch", 60.0)
    assert not isinstance(error.value, calls.StoreLost), "with a node, all that it held is lost"
    assert not both.replace_store({})


@pytest.mark.parametrize(
    ("address", "says"), [("10.0.0.9", "on the node 10.0.0.9: no such file"), (None, "no such file")]
)
def test_a_mistake_that_another_machine_finds_names_it(
    monkeypatch: pytest.MonkeyPatch, address: str | None, says: str
) -> None:
    address = address or calls.ray.util.get_node_ip_address()
    said = f"\x1b[36mray::P.setup()\x1b[39m (pid=7, ip={address}, actor_id=0, repr=P)\n  File x.py, line 1, in setup"
    failure = RayTaskError("setup", said, UserError("no such file")).as_instanceof_cause()
    monkeypatch.setattr(calls, "failure_of", lambda ref: failure)
    monkeypatch.setattr(calls.ray, "wait", lambda refs, **_: (refs, []))
    with pytest.raises(UserError) as caught:
        calls.gather(["setup"], "the learner", 5.0)
    assert str(caught.value) == says


def test_the_cause_is_what_was_raised_or_what_ray_says_first() -> None:
    raised = RayTaskError("f", "Traceback:\n  File x.py\nModuleNotFoundError: No module named 'vla_rl'", RuntimeError())
    assert calls.cause_of(raised) == "ModuleNotFoundError: No module named 'vla_rl'"
    assert calls.cause_of(ActorDiedError(raised)) == "ModuleNotFoundError: No module named 'vla_rl'"
    assert calls.cause_of(RayActorError()) == RayActorError.BASE_ERROR_MSG
