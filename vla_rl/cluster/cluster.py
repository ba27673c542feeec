"""From a plan to supervised processes.

Ray places, starts and watches the processes, and carries whole trajectories and super-batches through its object store.
Observations, actions and weights go through shared memory (``vla_rl.core.ipc``). Every component is a plain class that
knows nothing of Ray; ``vla_rl.cluster.processes`` builds them inside their processes.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from vla_rl.cluster.calls import ProcessDied, ProcessFailed, StoreLost, describe, failure_of, gather, user_error_of
from vla_rl.cluster.deadlines import Deadlines
from vla_rl.cluster.disks import Disks, Part
from vla_rl.cluster.env_hosts import EnvHosts
from vla_rl.cluster.held_folder import sweep_leftovers
from vla_rl.cluster.launcher import Launcher
from vla_rl.cluster.network import Network
from vla_rl.cluster.processes.common import CALL_TIMEOUT_S
from vla_rl.cluster.processes.weight_relay import relay_source
from vla_rl.cluster.ray_session import RaySession
from vla_rl.cluster.startup import Startup
from vla_rl.cluster.stats import Inquiry, Stats
from vla_rl.cluster.supervision import Replacements, Supervision
from vla_rl.cluster.survivors import Loop, Survivors, has_lost_another
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RecoverableError
from vla_rl.core.ipc.publication import publication
from vla_rl.core.records import EnvSpec
from vla_rl.placement.plan import STORE, Plan, Process, sharing_learner
from vla_rl.placement.shared_memory import SharedMemoryNeeds
from vla_rl.replay.rules import StoreRules

_SPANS_S, _NOTES_S = 1.0, 2.0  # in which processes say what they have recorded, and warn of
_NOTICE_S = 2.0  # in which Ray tells of a death whose consequences were seen
_HOST_NOTICE_S = 10.0  # in which it is seen that a process has died because its env host is gone


class Cluster:
    """All processes of one run; a context manager that leaves none behind."""

    def __init__(self, config: RunConfig, plan: Plan, spec: EnvSpec, rules: StoreRules) -> None:
        """Raises UserError if this version cannot run the plan."""
        plan.require_runtime()
        self.config, self.plan, self.spec = config, plan, spec
        self.deadlines = Deadlines.of(config, spec)
        self._rules = rules
        self.notify: Callable[[str], None] = lambda text: None  # called with what happens to processes
        self.status: Callable[[str], None] = lambda text: None  # called while processes start, with what is not ready
        self.meanwhile: Callable[[], None] = lambda: None  # called every few seconds while somebody waits
        self._incarnations = Counter[int]()  # how often each env worker was replaced
        replaced = (*plan.workers, *plan.servers, *plan.links, STORE)
        self._replacements = Replacements([f"{p.role} {p.index}" for p in replaced])
        self._survivors = Survivors()
        self.store: ActorHandle
        self._forget()

    def _forget(self) -> None:
        """All processes."""
        self._loops: dict[ray.ObjectRef, Loop] = {}  # of processes that are replaced if they die
        self._vital: dict[ray.ObjectRef, str] = {}  # calls that end with processes without which nothing goes on
        self._stranded: dict[ray.ObjectRef, Loop] = {}  # of env workers that have lost the store
        self._stats = Stats()
        self._spans = Inquiry[str]("take_spans", _SPANS_S)
        self._notes = Inquiry[int]("notes", _NOTES_S)
        self._startup = Startup(self.plan.envs_per_worker)
        self._is_starting = False
        self._inference_offloaded = False
        self._unconnected: list[int] = []  # servers that were replaced while inference was offloaded
        self._to_replace: dict[Loop, float] = {}  # ended processes, and when to start them again
        self._unclear: dict[Loop, tuple[RayError | None, float]] = {}  # died with their env host, or are replaced soon
        self._workers: dict[int, ActorHandle] = {}  # those of absent env hosts are not there
        self._servers: list[ActorHandle] = []
        self.learners: list[ActorHandle] = []
        self._relays: list[ActorHandle] = []
        self._network: Network | None = None
        self._hosts: EnvHosts | None = None
        self.world_model: ActorHandle | None = None

    def __enter__(self) -> Self:
        sweep_leftovers()  # of dead runs, before free memory is asked for
        needs = SharedMemoryNeeds.of(self.config, self.spec, self.plan)
        needs.check()
        self._session = RaySession(self.config, needs.trajectories)
        self._launch = Launcher(self.config, self.spec, self.plan, self._session)
        self.disks = Disks(self._session)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        in_haste = (RecoverableError, RayError, KeyboardInterrupt)  # some never answer, and somebody waits
        if not isinstance(error, in_haste):
            self._stop_loops()
        self._session.close()
        if isinstance(error, RayError):
            raise ProcessDied(f"Ray has lost a process: {describe(error)}") from error

    @property
    def loops(self) -> dict[ray.ObjectRef, Any]:
        """Calls that do not end while all is well."""
        return self._loops | self._vital

    @property
    def restarts(self) -> int:
        """Of env workers, inference servers and the store."""
        return self._replacements.count

    def progressed(self) -> None:
        """To be called when episodes have come in: deaths before do not count as those of a run that gets nowhere."""
        self._replacements.progressed()

    def _stop_loops(self) -> None:
        """Ask all loops to stop, and give them a few seconds."""
        if ray.is_initialized():
            models = () if self.world_model is None else (self.world_model,)
            links = self._network.actors().values() if self._network else ()
            stops = [a.stop.remote() for a in (*self._workers.values(), *self._servers, *models, *links)]
            if hasattr(self, "store"):
                stops.append(self.store.stop.remote())
            ray.wait([*stops, *self._loops], num_returns=len(stops) + len(self._loops), timeout=5.0)

    def retire(self) -> bool:
        """After a failure: end all processes, but keep simulators and policies that are loaded for the next ``start``.

        Returns whether that is possible: on one machine, with a plan that stays, as long as Ray answers.
        """
        if self._session.is_shared or self.config.placement.replan_every or not hasattr(self, "store"):
            return False
        candidates: dict[Loop, ActorHandle] = {("env worker", i): worker for i, worker in self._workers.items()}
        others = [self.store, *self.learners, *self._relays]
        others += [] if self.world_model is None else [self.world_model]
        for i, server in enumerate(self._servers):
            if self.plan.offload or self._attaches(i):  # it has to be built again
                others.append(server)
            else:
                candidates["inference server", i] = server
        try:
            self._session.require_ray()
            self._survivors = Survivors.of(self._loops | self._stranded, candidates, others)
        except (RayError, ProcessDied):
            return False
        self._forget()
        return True

    def start(self, state: Path | None, policy_version: int) -> None:
        """Create all processes, and wait until ``policy_version`` is published and inference answers.

        No episode is played until the store is opened. ``state`` is the folder of a learner state to continue from.
        Raises UserError if a process finds a mistake in the user's input.
        """
        spec, plan, self._is_starting = self.spec, self.plan, True
        self._session.begin()
        for node, addresses in self._launch.pools().items():
            self._session.call(node, "create_pools", addresses, spec, self.config.policy.spec(spec))
        placement = self.config.placement
        stall_s = max(placement.stall_timeout_s, 2e-3 * placement.max_wait_ms)  # requests may wait for others so long
        self._supervision = Supervision(self._session, plan, stall_s, self.deadlines.setup)
        kept, self._survivors = self._survivors.processes, Survivors()
        self.learners = [self._launch.learner(p) for p in plan.learners]  # first: they take longest to start
        for learner, p in zip(self.learners, plan.learners, strict=True):
            self._vital[learner.stay.remote()] = f"{p.role} {p.index}"
        self._servers = [kept.get(("inference server", p.index)) or self._launch.server(p) for p in plan.servers]
        self._start_store()
        near = [p for p in plan.workers if not p.remote]
        self._workers = {p.index: self._new_worker(p, kept.get(("env worker", p.index))) for p in near}
        builds = [
            server.build.remote(self._attaches(i))
            for i, server in enumerate(self._servers)
            if ("inference server", i) not in kept
        ]
        self._startup.expect("inference", builds)
        compress = self.config.placement.env_host_compress
        self._network = Network(self._launch, plan, len(spec.instructions), compress, self.deadlines.setup)
        self._start_gateways(plan.gateways)
        self._replacements.absent = {f"{p.role} {p.index}" for p in (*plan.remote, *plan.request_relays)}
        self._hosts = EnvHosts(self, self._session, self._launch, self._network, self._supervision)
        if self.learners:
            self._set_up_learners(state, policy_version)
        self.get(builds, "the policy of the inference servers", self.deadlines.setup)
        for i in range(len(self._servers)):
            self._connect(i)
        if plan.world_model is not None:
            self._start_world_model(plan.world_model, state.parent if state else None)
        self._is_starting = False

    def _start_world_model(self, process: Process, checkpoint: Path | None) -> None:
        self.world_model = self._launch.world_model(process)
        setup: ray.ObjectRef = self.world_model.setup.remote(self.store, checkpoint)
        self._startup.expect("world model", [setup])
        self.get(setup, "the world model", self.deadlines.setup)
        self.call_store("attach_world_model", self.world_model)
        position = len(self.plan.workers_of(0))
        loop = self.world_model.run.remote(
            self._launch.pool(0), position, self.plan, self._supervision.address(process)
        )
        self._loops[loop] = ("world model", 0)

    def _set_up_learners(self, state: Path | None, policy_version: int) -> None:
        address = None  # on one machine, the ranks find each other by a file, and nothing listens
        if self._session.is_shared:
            address = self.get(self.learners[0].address.remote(), "the learner's address", self.deadlines.setup)
        weights = self._launch.weights(self.plan.learners[0].node)
        nodes = {p.node for p in self.plan.learners}
        states = {} if state is None else {node: self.disks.send(state, node) for node in nodes}
        setups = [
            learner.setup.remote(address, weights, states.get(p.node), policy_version, self._supervision.address(p))
            for learner, p in zip(self.learners, self.plan.learners, strict=True)
        ]
        self._startup.expect("learner", setups)
        self.get(setups, "the learner to be built", self.deadlines.setup)
        for node, copy in states.items():
            self.disks.discard(copy, node)
        for p in self.plan.relays:
            relay = self._launch.relay(p)
            self._vital[relay.stay.remote()] = f"{p.role} {p.index}"
            relay.beat.remote(self._supervision.address(p))
            source = [self.learners[0], *self._relays][relay_source(len(self._relays) + 1)]
            self.get(relay.connect.remote(source), "a relay of weights", self.deadlines.setup)
            self._relays.append(relay)
        self._relay(publication(policy_version))
        if self.plan.offload:
            self._call_learners("offload")

    def _connect(self, index: int) -> None:
        """Start the loop of an inference server that has been built."""
        server, process = self._servers[index], self.plan.servers[index]
        weights = self._launch.weights(process.node) if self.learners else None
        frozen: ray.ObjectRef | None = None
        if (sharing := sharing_learner(self.config, self.plan, process)) is not None:
            path = self._launch.frozen_weights(process, sharing)
            frozen = self.learners[sharing].share_frozen_weights.remote(path)
        connection: ray.ObjectRef = server.connect.remote(
            self._launch.pool(index), weights, self.plan.max_batch, frozen
        )
        self.get(connection, "an inference server to be connected", self.deadlines.setup)
        self._loops[server.run.remote(self._supervision.address(process))] = "inference server", index

    def _start_gateways(self, processes: Sequence[Process]) -> None:
        """These, or new ones in their place."""
        assert self._network is not None
        self._loops |= self._network.start(processes, self.get, self._supervision.address)

    def arrive(self, workers: Sequence[Process], relay: Process) -> None:
        """See ``Crew``, as the next two."""
        self._replacements.absent -= {f"{p.role} {p.index}" for p in (*workers, relay)}
        self._workers |= {p.index: self._new_worker(p) for p in workers}

    def depart(self, workers: Sequence[Process], relay: Process) -> None:
        gone = {(p.role, p.index) for p in (*workers, relay)}
        self._loops = {ref: loop for ref, loop in self._loops.items() if loop not in gone}
        self._stranded = {ref: loop for ref, loop in self._stranded.items() if loop not in gone}
        self._to_replace = {loop: when for loop, when in self._to_replace.items() if loop not in gone}
        self._unclear = {loop: death for loop, death in self._unclear.items() if loop not in gone}
        self._replacements.absent |= {f"{role} {index}" for role, index in gone}
        for p in workers:
            if (worker := self._workers.pop(p.index, None)) is not None:
                ray.kill(worker)
                self.store.worker_lost.remote(self._number(p.index), with_host=True)
                self._incarnations[p.index] += 1

    def keep(self, loop: ray.ObjectRef, process: Process) -> None:
        self._loops[loop] = process.role, process.index

    @property
    def env_hosts(self) -> int:
        """How many play."""
        return len(self._hosts.places.playing) if self._hosts else 0

    @property
    def wanted(self) -> str:
        """Which env hosts the run waits for (``EnvHosts.wanted``); empty if enough play."""
        return self._hosts.wanted if self._hosts else ""

    def _attaches(self, server: int) -> bool:
        return bool(self.learners) and sharing_learner(self.config, self.plan, self.plan.servers[server]) is not None

    def _start_store(self) -> None:
        self.store = self._launch.store(self._rules)
        self._store_stays: ray.ObjectRef = self.store.stay.remote()
        self._vital[self._store_stays] = STORE.role
        self.store.beat.remote(self._supervision.address(STORE))

    def _new_worker(self, process: Process, kept: ActorHandle | None = None) -> ActorHandle:
        """Plays at once. ``kept``: a process that has played before."""
        worker = kept or self._launch.worker(process)
        loop: ray.ObjectRef = worker.run.remote(
            self._number(process.index),
            *self._launch.seat(process),
            self.plan,
            self.store,
            self._supervision.address(process),
        )
        self._loops[loop] = ("env worker", process.index)
        return worker

    def _number(self, worker: int) -> int:
        """By which the store knows an env worker until it is replaced."""
        return worker + self._incarnations[worker] * len(self.plan.workers)

    def building(self) -> str:
        """What is not ready yet, such as "simulators 2 of 4"; empty if all is."""
        return self._startup.text(self._workers)

    def look(self) -> None:
        """Kill processes that make no progress, as if they had died; replace those whose pause is over."""
        for killed in self._supervision.look():
            self.notify(killed)
        now = time.monotonic()
        while due := next((one for one, when in self._to_replace.items() if when <= now), None):
            del self._to_replace[due]  # first, since this is called again while a new server is waited for
            self._replace(*due)
        if self._hosts is not None:
            self._hosts.look()
        while died := next((one for one, (_, until) in self._unclear.items() if until <= now), None):
            failure, _ = self._unclear.pop(died)
            self._ended(*died, failure)
        if self._is_starting:
            self.status(f"starting: {self.building() or 'connecting what is built'}")
        self.meanwhile()

    def watch(self, seconds: float) -> None:
        """Look after all processes for so long."""
        ended, _ = ray.wait(list(self.loops), timeout=seconds)
        self.look()
        for ref in ended:
            if ref in self.loops:
                self.loop_ended(ref)

    def publish(self, policy_version: int, *, average: bool = False) -> None:
        """Weight sync: publish the learner's weights, or their ``average``, to the inference servers of all nodes.

        The average of a version comes before its weights.
        """
        self._call_learners("publish", policy_version, average=average)
        self._relay(publication(policy_version, average=average))

    def _relay(self, version: int) -> None:
        pulls = [relay.pull.remote(version) for relay in self._relays]
        self.get(pulls, "the relay of weights to other nodes", self.deadlines.publish)

    @contextlib.contextmanager
    def learner_on_device(self) -> Iterator[None]:
        """Within the block the learner may compute. In a plan that offloads, inference is offloaded meanwhile."""
        if not self.plan.offload:
            yield
            return
        self._call_servers("offload")
        self._inference_offloaded = True
        self._call_learners("onload")
        yield
        self._call_learners("offload")
        self._inference_offloaded = False
        self._call_servers("onload")
        while self._unconnected:
            self._connect(self._unconnected.pop())

    def _call_learners(self, method: str, *args: Any, **options: Any) -> None:
        calls = [getattr(learner, method).remote(*args, **options) for learner in self.learners]
        self.get(calls, f"the learner ({method})", self.deadlines.publish)

    def _call_servers(self, method: str) -> None:
        calls = [getattr(s, method).remote() for i, s in enumerate(self._servers) if i not in self._unconnected]
        for call in calls:
            with contextlib.suppress(ProcessDied):  # a dead server holds no device, and is replaced
                self.get(call, f"an inference server ({method})", self.deadlines.setup)

    def get(self, refs: Any, what: str, timeout: float) -> Any:
        """The results of remote calls; all processes are watched while waiting.

        An env worker or inference server that has ended is replaced; without a learner, the cluster is at its end. The
        death of the store is left to whoever calls it next. Raises as ``gather``.
        """
        wanted = refs if isinstance(refs, list) else [refs]
        results = gather(wanted, what, timeout, self)
        return results if isinstance(refs, list) else results[0]

    def loop_ended(self, ref: ray.ObjectRef) -> None:
        """Replace a worker or server whose loop ended; not at once if it has died again and again.

        Raises UserError if it has found a mistake in the user's input, and ProcessDied or ProcessFailed if it, or too
        many, cannot be replaced.
        """
        failure = failure_of(ref)
        if ref == self._store_stays:
            del self._vital[ref]
            return
        place = self._place_of(*self._loops.get(ref, ("", 0)))
        if has_lost_another(failure) and place is None:  # the worker itself is well, and is kept
            if self._loops[ref][0] != "env worker" or not self._has_lost_store():
                raise ProcessDied(f"a process has lost the replay store: {describe(failure)}")
            self._stranded[ref] = self._loops.pop(ref)
            return
        if (name := self._vital.get(ref)) is not None:  # it stays there: whoever goes on in spite of it sees it, too
            raise ProcessDied(f"the {name} died: {'it returned' if failure is None else describe(failure)}")
        role, index = self._loops.pop(ref)
        mistake = user_error_of(failure)
        if mistake is not None and not isinstance(mistake, RecoverableError):
            if place is not None and self._hosts is not None and len(self._hosts.places.playing - {place}):
                self._hosts.leave(place, str(mistake))  # it lacks something, and others do not
                return
            raise mistake from None
        if role == "world model":  # what it has learned is in the last checkpoint
            kind = ProcessFailed if isinstance(failure, RayTaskError) else ProcessDied
            raise kind(f"the world model's process ended: {'it returned' if failure is None else describe(failure)}")
        is_cut_off = failure is not None and (not isinstance(failure, RayTaskError) or has_lost_another(failure))
        if place is not None and is_cut_off:
            self._unclear[role, index] = failure, time.monotonic() + _HOST_NOTICE_S
        else:
            self._ended(role, index, failure)

    def _place_of(self, role: str, index: int) -> int | None:
        """The place of a process on an env host."""
        away = {"request relay": self.plan.request_relays, "env worker": self.plan.workers}.get(role, ())
        return away[index].node if away and away[index].node in self.plan.env_hosts else None

    def _ended(self, role: str, index: int, failure: RayError | None) -> None:
        name, now = f"{role} {index}", time.monotonic()
        try:
            reason = self._replacements.admit(name, failure)
        except (ProcessDied, ProcessFailed) as error:
            if role != "request relay" or self._hosts is None:
                raise
            return self._hosts.leave(self.plan.request_relays[index].node, str(error))
        pause = self._replacements.pause(name, now)
        self.notify(f"{name} is replaced{f' in {pause:.0f} s' if pause else ''}: {reason}")
        if role == "env worker":
            self.store.worker_lost.remote(self._number(index))
            self._incarnations[index] += 1
        if pause:
            self._to_replace[role, index] = now + pause
        else:
            self._replace(role, index, is_alive=isinstance(failure, RayTaskError))

    def _replace(self, role: str, index: int, is_alive: bool = False) -> None:
        """``is_alive``: whether the process has raised an error, and can play with a new simulator."""
        if role == "env worker":
            kept = self._workers[index] if is_alive else None
            self._workers[index] = self._new_worker(self.plan.workers[index], kept)
        elif role == "gateway":
            self._start_gateways([p for p in self.plan.gateways if p.index == index])
        elif role == "request relay":
            assert self._hosts is not None
            self._hosts.renew(self.plan.request_relays[index])
        else:
            self._servers[index] = self._launch.server(self.plan.servers[index])
            self.get(
                self._servers[index].build.remote(self._attaches(index)), "a new inference server", self.deadlines.setup
            )
            if self._inference_offloaded:
                self._unconnected.append(index)
            else:
                self._connect(index)

    def call_store(self, method: str, *args: Any) -> Any:
        """A quick call of the store. Raises StoreLost if it has died."""
        with self.asking_store():
            return self.get(getattr(self.store, method).remote(*args), f"the replay store ({method})", CALL_TIMEOUT_S)

    @contextlib.contextmanager
    def asking_store(self) -> Iterator[None]:
        """Within the block, StoreLost says that it was the store that has died, and nothing else that is vital."""
        try:
            yield
        except ProcessDied as error:
            if not self._has_lost_more() and self._has_lost_store():
                raise StoreLost(f"the replay store died: {str(error).splitlines()[0]}") from error
            raise

    def _has_lost_store(self) -> bool:
        return bool(ray.wait([self._store_stays], timeout=_NOTICE_S)[0])

    def _has_lost_more(self) -> bool:
        """Than the store: what cannot be replaced alone."""
        vital = [ref for ref in self._vital if ref != self._store_stays]
        return bool(vital and ray.wait(vital, timeout=0.0)[0])

    def replace_store(self, record: dict[str, Any]) -> bool:
        """A new store, open, in place of one that has died. Learners and inference go on; simulators are kept.

        ``record``: of ``ReplayStore.outline``. Returns False where a whole restart is needed: another process is gone,
        too, or a world model knows the old store. Raises ProcessDied or ProcessFailed if it has died too often, and
        ProcessDied if Ray's own processes have ended.
        """
        self._session.require_ray()
        if self.world_model is not None or self._has_lost_more():
            return False
        name = f"{STORE.role} {STORE.index}"
        reason = self._replacements.admit(name, failure_of(self._store_stays))
        self.notify(f"{name} is replaced: {reason}")
        time.sleep(self._replacements.pause(name, time.monotonic()))
        workers: dict[Loop, ActorHandle] = {("env worker", i): worker for i, worker in self._workers.items()}
        try:
            kept = Survivors.of(self._loops | self._stranded, workers, [self.store]).processes
        except RayError:
            return False
        self._loops = {ref: loop for ref, loop in self._loops.items() if loop not in workers}
        self._to_replace = {loop: when for loop, when in self._to_replace.items() if loop not in workers}
        self._unclear = {loop: death for loop, death in self._unclear.items() if loop not in workers}
        self._stranded.clear()
        self._vital.pop(self._store_stays, None)
        self._start_store()
        self.call_store("restore", record, [])
        self.call_store("open")
        self._workers = {i: self._new_worker(self.plan.workers[i], kept.get(("env worker", i))) for i in self._workers}
        return True

    def snapshot(self, folder: Path, metadata: dict[str, Any]) -> tuple[dict[str, Any], list[Part]]:
        """Copy everything that a checkpoint holds, between two updates, and begin to write it into ``folder``.

        Returns the store's counters, and what each process writes.
        """
        places = [self.disks.place(folder, p.node) for p in self.plan.learners]
        with self.learner_on_device():
            learners = zip(self.learners, places, strict=True)
            copies = [learner.snapshot.remote(place, metadata) for learner, place in learners]
            stored: Any = self.store.snapshot.remote(folder)
            *_, record = self.get([*copies, stored], "a copy of the learner's state", self.deadlines.checkpoint)
        here = [self.store, *([] if self.world_model is None else [self.world_model])]
        parts = [Part(one.write.remote(folder), 0, folder) for one in here]
        for learner, p, place in zip(self.learners, self.plan.learners, places, strict=True):
            parts.append(Part(learner.write.remote(place), p.node, place))
        return record, parts

    def has_answered(self, refs: list[ray.ObjectRef]) -> bool:
        """Whether all of these calls have ended."""
        return len(ray.wait(refs, num_returns=len(refs), timeout=0.0)[1]) == 0

    def notes(self) -> list[str]:
        """What env workers warn of since the last call, each text once; without those that do not answer at once."""
        return list(dict.fromkeys(text for _, texts in self._notes.ask(self._workers) for text in texts))

    def stats(self) -> dict[str, dict[int, dict[str, float]]]:
        """Meter totals of every process that is there, by index, and of the devices that several share."""
        servers, learners = dict(enumerate(self._servers)), dict(enumerate(self.learners))
        groups = {"worker": self._workers, "server": servers, "learner": learners}
        if self.world_model is not None:
            groups["world_model"] = {0: self.world_model}
        links = self._network.actors() if self._network else {}
        for name, role in (("gateway", "gateway"), ("relay", "request relay")):
            groups[name] = {p.index: actor for p, actor in links.items() if p.role == role}
        use = self._session.lock_use()
        shared = [use[name] for name in self.plan.locks if name in use]
        held = {i: {"held_s": u["held"], "waited_s": u["waited"]} for i, u in enumerate(shared)}
        return self._stats.ask(groups) | {"device": held}

    def spans(self) -> list[tuple[str, bytes]]:
        """What the processes have recorded since the last call: their names, and parts of their files."""
        plan, network = self.plan, self._network.actors() if self._network else {}
        actors = {plan.workers[i]: worker for i, worker in self._workers.items()} | network | {STORE: self.store}
        for planned, there in ((plan.servers, self._servers), (plan.learners, self.learners)):
            actors |= dict(zip(planned, there, strict=True))
        if plan.world_model is not None and self.world_model is not None:
            actors[plan.world_model] = self.world_model
        return self._spans.ask({f"{p.role} {p.index}": actor for p, actor in actors.items()})
