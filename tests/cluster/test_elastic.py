"""Env hosts that come and go, with Ray replaced by calls that end when the test says so."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from tests.learner.learner_tools import SPEC
from vla_rl.cluster import calls, env_hosts
from vla_rl.cluster.cluster import Cluster
from vla_rl.cluster.deadlines import Deadlines
from vla_rl.cluster.env_hosts import EnvHosts, Places
from vla_rl.cluster.launcher import Launcher
from vla_rl.cluster.processes import env_worker
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import StallError, UserError
from vla_rl.core.machine import code_version
from vla_rl.placement.plan import Plan, Process
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import ENV_HOST, Node, Resources
from vla_rl.replay.rules import StoreRules

CONFIG = RunConfig.model_validate(
    {
        "env": {"name": "workload"},
        "placement": {"env_workers": 4, "env_hosts": {"min": 1, "max": 2}, "ray_address": "auto"},
    }
)
PLAN = make_plan(CONFIG, Resources.on((Node(2, 2), Node(2, 0), Node(2, 0)), "cpu"))


# --- which host has which place -------------------------------------------------------------------------------------


def test_a_host_takes_the_first_free_place_and_leaves_it_to_another() -> None:
    places = Places((1, 2), least=1)
    assert places.take(["a"], 0.0) == {1: "a"}
    assert places.take(["a", "b", "c"], 1.0) == {2: "b"}, "there is none for c"
    assert places.gone(["b", "c"]) == [1]
    places.leave(1, 2.0)
    assert places.take(["b", "c"], 3.0) == {1: "c"}
    places.leave(1, 4.0)
    assert places.take(["a", "b", "c"], 5.0) == {}, "both have left just now"
    assert places.take(["a", "b", "c"], 2.0 + env_hosts._AGAIN_S) == {1: "a"}


def test_too_few_hosts_play_until_they_are_complete() -> None:
    places = Places((1, 2), least=2)
    places.take(["a", "b"], 0.0)
    assert places.too_few == "0 of 2", "they are starting"
    places.playing |= {1, 2}
    assert places.too_few == ""
    places.leave(2, 1.0)
    assert places.too_few == "1 of 2"
    assert Places((1,), least=5).least == 1, "a run does not wait for hosts for which there is no place"


# --- what happens to a host's processes -----------------------------------------------------------------------------


class Ray:
    """Calls are names; those in ``ended`` have answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: dict[str, Any] = {}
        for module in (env_hosts, calls):
            monkeypatch.setattr(module, "ray", SimpleNamespace(wait=self.wait, get=self.get))
        monkeypatch.setattr(env_hosts, "_LOOK_EVERY_S", 0.0)

    def wait(self, refs: list[str], **_: Any) -> tuple[list[str], list[str]]:
        return [ref for ref in refs if ref in self.ended], [ref for ref in refs if ref not in self.ended]

    def get(self, ref: str) -> Any:
        if isinstance(self.ended[ref], Exception):
            raise self.ended[ref]
        return self.ended[ref]


def _remote(name: Callable[[str], str]) -> Any:
    """An actor whose calls are named by ``name``."""

    class Actor:
        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_, **__: name(method))

    return Actor()


class World:
    """All that an ``EnvHosts`` deals with, and what it has done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray, self.alive, self.lost = Ray(monkeypatch), dict[str, dict[str, Any]](), dict[int, str]()
        self.working, self.said, self.watched = list[int](), list[str](), dict[int, Path | None]()
        session: Any = SimpleNamespace(
            join=lambda place, host, name: _remote(lambda method: f"{host}.{method}"),
            others_alive=lambda: dict(self.alive),
            address="10.0.0.1:6379",
            use=lambda place, folder: None,
            leave=lambda place: None,
            folder=lambda node: Path("/dev/shm") / str(node),
        )
        supervision: Any = SimpleNamespace(
            take_lost=self._take_lost, rows=9, watch=self.watched.__setitem__, address=lambda process: None
        )
        network: Any = SimpleNamespace(start_relay=self._start_relay, leave=lambda relay: None)
        launch = Launcher(CONFIG, SPEC, PLAN, session)
        self.config, self.spec, self.plan, self.deadlines = CONFIG, SPEC, PLAN, Deadlines(setup=60.0)
        self.notify: Callable[[str], None] = self.said.append
        self.hosts = EnvHosts(self, session, launch, network, supervision)

    def _take_lost(self) -> dict[int, str]:
        lost, self.lost = self.lost, {}
        return lost

    def _start_relay(self, relay: Process, *_: Any) -> Any:
        yield f"relay {relay.index}"

    def arrive(self, workers: Sequence[Process], relay: Process) -> None:
        assert {p.node for p in (*workers, relay)} == {relay.node}
        self.working += [p.index for p in workers]

    def depart(self, workers: Sequence[Process], relay: Process) -> None:
        self.working = [index for index in self.working if index not in {p.index for p in workers}]

    def keep(self, loop: Any, process: Process) -> None:
        raise AssertionError("the relay keeps none here")

    def appear(self, host: str, **resources: float) -> None:
        self.alive[host] = {"NodeManagerHostname": host, "NodeManagerAddress": "10.0.0.2", "Resources": resources}
        self.ray.ended |= {
            f"{host}.get_code": (code_version(), Path("there")),
            f"{host}.begin": Path("/dev/shm/x/1"),
            f"{host}.create_pools": None,
            f"{host}.create_pulses": Path("/dev/shm/x/1/pulses"),
        }

    def look(self) -> None:
        for _ in range(6):
            self.hosts.look()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def _workers(plan: Plan, place: int) -> list[int]:
    return [worker.index for worker in plan.workers if worker.node == place]


def test_a_host_that_joins_plays_with_the_env_workers_of_its_place(world: World) -> None:
    assert world.hosts.wanted.startswith("0 of 1 (placement.env_hosts.min); join one with `vla-rl join 10.0.0.1:6379`")
    world.appear("a")
    world.look()
    assert world.working == _workers(PLAN, 1), "simulators start while the relay does"
    assert world.watched == {1: Path("/dev/shm/x/1/pulses")}
    assert world.hosts.wanted, "the relay has not reached its gateways yet"
    world.ray.ended["relay 0"] = None
    world.look()
    assert not world.hosts.wanted
    assert world.said == ["env host a, 10.0.0.2 has joined with 2 env workers; 1 play"]


def test_hosts_that_only_simulate_come_first(world: World) -> None:
    world.appear("a", GPU=1)
    world.appear("b", GPU=0)
    world.appear("c", GPU=8, **{ENV_HOST: 1})
    world.look()
    assert world.hosts.places.hosts == {1: "c", 2: "b"}


def test_a_host_that_leaves_takes_its_own_processes_and_nothing_else(world: World) -> None:
    world.ray.ended |= {"relay 0": None, "relay 1": None}
    for host in ("a", "b"):
        world.appear(host)
    world.look()
    assert sorted(world.working) == [0, 1, 2, 3]
    del world.alive["a"]
    world.look()
    assert world.working == _workers(PLAN, 2)
    assert world.watched[1] is None
    assert world.said[-1] == "env host a, 10.0.0.2 has left, 1 play: Ray has lost its node"
    world.appear("c")
    world.look()
    assert world.hosts.places.hosts == {1: "c", 2: "b"}, "in the place of the one that has left"
    world.lost[2] = "node 2 (b, 10.0.0.2) is lost: it has not answered for 60 s\nmore"
    world.look()
    assert world.working == _workers(PLAN, 1)
    assert world.hosts.places.hosts == {1: "c"}, "Ray believes in b, which is not tried again at once"
    assert world.said[-1].endswith("it has not answered for 60 s")


@pytest.mark.parametrize(
    ("call", "failure", "says"),
    [
        ("a.get_code", ("another", Path("/there")), "the nodes run different code"),
        ("a.begin", RayActorError(), "it is tried again in 60 s"),
        ("relay 0", RayTaskError("reach", "\nStallError: 10.0.0.2 has not reached", StallError()), "has not reached"),
    ],
)
def test_a_host_that_cannot_be_used_says_why_and_the_run_goes_on(
    world: World, call: str, failure: Any, says: str
) -> None:
    world.appear("a")
    world.ray.ended[call] = failure
    world.look()
    assert not world.working
    assert world.hosts.wanted
    (text,) = world.said
    assert text.startswith("env host a, 10.0.0.2 has left, 0 play: ")
    assert says in text


def test_a_host_that_takes_too_long_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.appear("a")
    del world.ray.ended["a.begin"]
    world.look()
    assert not world.said
    now = env_hosts.time.monotonic()
    monkeypatch.setattr(env_hosts.time, "monotonic", lambda: now + 61.0)
    world.hosts.look()
    assert world.said == ["env host a, 10.0.0.2 has left, 0 play: it has not started within 60 s"]


# --- who is to blame ------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose env worker 0 runs on an env host, and dies when the test says so."""
    cluster: Any = Cluster(CONFIG, PLAN, SPEC, StoreRules.of(CONFIG, SPEC))
    cluster.replaced, cluster.lost, cluster.failure = [], [], RayActorError()
    cluster._hosts = SimpleNamespace(look=lambda: None, places=Places((), 0))
    cluster._supervision = SimpleNamespace(look=list)
    cluster._store_stays = "store stays"
    worker_lost = SimpleNamespace(remote=lambda number, with_host=False: cluster.lost.append((number, with_host)))
    cluster.store = SimpleNamespace(worker_lost=worker_lost)
    cluster._replace = lambda role, index, is_alive=False: cluster.replaced.append((role, index))
    cluster._loops, cluster._workers = {"loop": ("env worker", 0)}, {0: "its handle"}
    monkeypatch.setattr("vla_rl.cluster.cluster.failure_of", lambda ref: cluster.failure)
    monkeypatch.setattr("vla_rl.cluster.cluster.ray.kill", lambda actor: None)
    monkeypatch.setattr("vla_rl.cluster.cluster.ray.wait", lambda refs, **_: ([], refs))
    return cluster


def test_an_env_worker_that_dies_with_its_host_blames_no_episode(cluster: Any) -> None:
    assert PLAN.workers[0].remote
    cluster.loop_ended("loop")
    cluster.look()
    assert (cluster.replaced, cluster.lost, cluster.restarts) == ([], [], 0), "its host may be gone"
    cluster.depart([PLAN.workers[0]], PLAN.request_relays[0])
    assert cluster.lost == [(0, True)]
    assert cluster._number(0) == len(PLAN.workers), "a late call of the dead one takes nothing"
    assert not cluster._unclear
    assert not cluster._workers


def test_an_env_worker_that_dies_alone_is_replaced(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.cluster.cluster._HOST_NOTICE_S", 0.0)
    cluster.loop_ended("loop")
    cluster.look()
    assert (cluster.replaced, cluster.lost, cluster.restarts) == ([("env worker", 0)], [(0, False)], 1)


def test_an_env_worker_that_has_lost_the_network_for_a_while_ends_no_run(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.cluster.cluster._HOST_NOTICE_S", 0.0)
    cluster.failure = RayTaskError("take", "", RayActorError()).as_instanceof_cause()
    cluster.loop_ended("loop")
    cluster.look()
    assert cluster.replaced == [("env worker", 0)]
    cluster._loops = {"loop": ("inference server", 0)}
    with pytest.raises(calls.ProcessDied, match="a process has lost the replay store"):
        cluster.loop_ended("loop")


def test_a_host_that_lacks_something_ends_no_run_in_which_others_play(cluster: Any) -> None:
    left = []
    cluster._hosts.leave = lambda place, why: left.append((place, why))
    cluster.failure = RayTaskError("run", "", UserError("no assets")).as_instanceof_cause()
    cluster._hosts.places.playing |= {1, 2}
    cluster.loop_ended("loop")
    assert left == [(PLAN.workers[0].node, "no assets")]
    cluster._hosts.places.playing -= {2}
    cluster._loops = {"loop": ("env worker", 0)}
    with pytest.raises(UserError, match="no assets"):
        cluster.loop_ended("loop")


def test_a_request_relay_that_fails_again_and_again_costs_its_host_and_not_the_run(cluster: Any) -> None:
    left = []
    cluster._hosts.leave = lambda place, why: left.append((place, why))
    cluster.failure = RayTaskError("run", "", StallError("nothing has come")).as_instanceof_cause()
    for _ in range(3):
        cluster._loops = {"loop": ("request relay", 1)}
        cluster.loop_ended("loop")
    ((place, why),) = left
    assert place == PLAN.request_relays[1].node
    assert "failed 3 times" in why


def test_a_store_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(ref: str, timeout: float) -> None:
        raise GetTimeoutError

    monkeypatch.setattr(env_worker, "ray", SimpleNamespace(get=late))
    with pytest.raises(StallError, match=r"the replay store has not answered for \d+ s"):
        env_worker.StoreClient(_remote(lambda method: "a call")).take(0, 1, 5.0)


def test_an_env_worker_whose_episode_did_not_arrive_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the store would wait for it: the worker's end tells that the episode is lost."""
    fake = Ray(monkeypatch)
    monkeypatch.setattr(env_worker, "ray", SimpleNamespace(wait=fake.wait, get=lambda refs: list(map(fake.get, refs))))
    names = iter(["first", "second", "third"])
    client = env_worker.StoreClient(_remote(lambda method: next(names)))
    client.add(0, "an episode")  # type: ignore[arg-type]
    client.add(0, "another")  # type: ignore[arg-type]
    fake.ended |= {"first": True, "second": RayActorError()}
    with pytest.raises(RayActorError):
        client.add(0, "the last")  # type: ignore[arg-type]
