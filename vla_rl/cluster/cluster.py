"""From a plan to supervised processes.

Ray places, starts and watches the processes, and carries whole trajectories and super-batches through its object store.
Observations, actions and weights go through shared memory (``vla_rl.core.ipc``). Every component is a plain class that
knows nothing of Ray; ``vla_rl.cluster.processes`` builds them inside their processes.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from vla_rl.cluster.calls import ProcessDied, ProcessFailed, describe, failure_of, gather
from vla_rl.cluster.deadlines import Deadlines
from vla_rl.cluster.held_folder import sweep_leftovers
from vla_rl.cluster.processes.common import CALL_TIMEOUT_S, working_in
from vla_rl.cluster.processes.env_worker import EnvWorkerProcess
from vla_rl.cluster.processes.inference import InferenceProcess
from vla_rl.cluster.processes.learner import LearnerProcess
from vla_rl.cluster.processes.store import StoreProcess
from vla_rl.cluster.processes.weight_relay import WeightRelayProcess, relay_source
from vla_rl.cluster.processes.world_model import WorldModelProcess
from vla_rl.cluster.ray_session import RaySession
from vla_rl.cluster.stats import Stats
from vla_rl.cluster.supervision import Replacements, Supervision
from vla_rl.cluster.survivors import Loop, Survivors, has_lost_another
from vla_rl.cluster.variables import variables
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import RecoverableError, UserError
from vla_rl.core.ipc.mailbox import PoolAddress
from vla_rl.core.records import EnvSpec
from vla_rl.placement.plan import STORE, Plan, Process, sharing_learner
from vla_rl.placement.shared_memory import SharedMemoryNeeds
from vla_rl.replay.rules import StoreRules


class Cluster:
    """All processes of one run; a context manager that leaves none behind."""

    def __init__(self, config: RunConfig, plan: Plan, spec: EnvSpec, rules: StoreRules) -> None:
        self.config, self.plan, self.spec = config, plan, spec
        self.deadlines = Deadlines.of(config, spec)
        self._rules = rules
        self._roles = _roles(config)
        self.notify: Callable[[str], None] = lambda text: None  # called with what happens to processes
        self.meanwhile: Callable[[], None] = lambda: None  # called every few seconds while somebody waits
        self._incarnations = Counter[int]()  # how often each env worker was replaced
        self._replacements = Replacements([f"{p.role} {p.index}" for p in (*plan.workers, *plan.servers)])
        self._survivors = Survivors()
        self.store: ActorHandle
        self._forget()

    def _forget(self) -> None:
        """All processes."""
        self._loops: dict[ray.ObjectRef, Loop] = {}  # of processes that are replaced if they die
        self._vital: dict[ray.ObjectRef, str] = {}  # calls that end with processes without which nothing goes on
        self._stats = Stats()
        self._inference_offloaded = False
        self._unconnected: list[int] = []  # servers that were replaced while inference was offloaded
        self._to_replace: dict[Loop, float] = {}  # ended processes, and when to start them again
        self._workers: list[ActorHandle] = []
        self._servers: list[ActorHandle] = []
        self.learners: list[ActorHandle] = []
        self._relays: list[ActorHandle] = []
        self.world_model: ActorHandle | None = None

    def __enter__(self) -> Self:
        sweep_leftovers()  # of dead runs, before free memory is asked for
        needs = SharedMemoryNeeds.of(self.config, self.spec, self.plan)
        needs.check()
        self._session = RaySession(self.config, needs.trajectories)
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
        """Of env workers and inference servers."""
        return self._replacements.count

    def progressed(self) -> None:
        """To be called when episodes have come in: deaths before do not count as those of a run that gets nowhere."""
        self._replacements.progressed()

    def _stop_loops(self) -> None:
        """Ask all loops to stop, and give them a few seconds."""
        if ray.is_initialized():
            models = () if self.world_model is None else (self.world_model,)
            stops = [a.stop.remote() for a in (*self._workers, *self._servers, *models)]
            if hasattr(self, "store"):
                stops.append(self.store.stop.remote())
            ray.wait([*stops, *self._loops], num_returns=len(stops) + len(self._loops), timeout=5.0)

    def retire(self) -> bool:
        """After a failure: end all processes, but keep simulators and policies that are loaded for the next ``start``.

        Returns whether that is possible: on one machine, with a plan that stays, as long as Ray answers.
        """
        if self._session.is_shared or self.config.placement.replan_every or not hasattr(self, "store"):
            return False
        candidates: dict[Loop, ActorHandle] = {("env worker", i): worker for i, worker in enumerate(self._workers)}
        others = [self.store, *self.learners, *self._relays]
        others += [] if self.world_model is None else [self.world_model]
        for i, server in enumerate(self._servers):
            if self.plan.offload or self._attaches(i):  # it has to be built again
                others.append(server)
            else:
                candidates["inference server", i] = server
        try:
            self._survivors = Survivors.of(self._loops, candidates, others)
        except RayError:
            return False
        self._forget()
        return True

    def start(self, state: Path | None, policy_version: int) -> None:
        """Create all processes, and wait until ``policy_version`` is published and inference answers.

        No episode is played until the store is opened. ``state`` is the folder of a learner state to continue from.
        Raises UserError if a process finds a mistake in the user's input.
        """
        spec, plan = self.spec, self.plan
        self._session.begin()
        for node in {p.node for p in plan.servers}:
            addresses = [self._address(p.index) for p in plan.servers if p.node == node]
            self._session.call(node, "create_pools", addresses, spec, self.config.policy.spec(spec))
        placement = self.config.placement
        stall_s = max(placement.stall_timeout_s, 2e-3 * placement.max_wait_ms)  # requests may wait for others so long
        self._supervision = Supervision(self._session, plan, stall_s, self.deadlines.setup)
        kept, self._survivors = self._survivors.processes, Survivors()
        self.learners = [  # first, as Ray starts processes in turn, and these take longest
            self._actor(self._roles[1], p).remote(self.config, spec, p, len(plan.learners), self._lock_server(p))
            for p in plan.learners
        ]
        for learner, p in zip(self.learners, plan.learners, strict=True):
            self._vital[learner.stay.remote()] = f"{p.role} {p.index}"
        self._servers = [kept.get(("inference server", p.index)) or self._new_server(p) for p in plan.servers]
        self.store = self._actor(StoreProcess, concurrency=2 * len(plan.workers) + 17).remote(self._rules)
        self._vital[self.store.stay.remote()] = STORE.role
        self.store.beat.remote(self._supervision.address(STORE))
        self._workers = [self._new_worker(p, kept.get(("env worker", p.index))) for p in plan.workers]
        builds = [
            server.build.remote(self._attaches(i))
            for i, server in enumerate(self._servers)
            if ("inference server", i) not in kept
        ]
        if self.learners:
            self._set_up_learners(state, policy_version)
        self.get(builds, "the policy of the inference servers", self.deadlines.setup)
        for i in range(len(self._servers)):
            self._connect(i)
        if plan.world_model is not None:
            self._start_world_model(plan.world_model, state.parent if state else None)

    def _start_world_model(self, process: Process, checkpoint: Path | None) -> None:
        self.world_model = self._actor(WorldModelProcess, process).remote(
            self.config, self.spec, process, self._lock_server(process)
        )
        self.get(self.world_model.setup.remote(self.store, checkpoint), "the world model", self.deadlines.setup)
        self.call_store("attach_world_model", self.world_model)
        position = len(self.plan.workers_of(0))
        loop = self.world_model.run.remote(self._address(0), position, self.plan, self._supervision.address(process))
        self._loops[loop] = ("world model", 0)

    def _set_up_learners(self, state: Path | None, policy_version: int) -> None:
        address = None  # on one machine, the ranks find each other by a file, and nothing listens
        if self._session.is_shared:
            address = self.get(self.learners[0].address.remote(), "the learner's address", self.deadlines.setup)
        home = self.plan.learners[0].node
        weights = _weights_path(self._session.folder(home))
        setups = [
            learner.setup.remote(address, weights, state, policy_version, self._supervision.address(p))
            for learner, p in zip(self.learners, self.plan.learners, strict=True)
        ]
        self.get(setups, "the learner to be built", self.deadlines.setup)
        for p in self.plan.relays:
            relay = self._actor(WeightRelayProcess, p, concurrency=17).remote(
                p, _weights_path(self._session.folder(p.node))
            )
            self._vital[relay.stay.remote()] = f"{p.role} {p.index}"
            relay.beat.remote(self._supervision.address(p))
            source = [self.learners[0], *self._relays][relay_source(len(self._relays) + 1)]
            self.get(relay.connect.remote(source), "a relay of weights", self.deadlines.setup)
            self._relays.append(relay)
        self._relay(policy_version)
        if self.plan.offload:
            self._call_learners("offload")

    def _connect(self, index: int) -> None:
        """Start the loop of an inference server that has been built."""
        server, folder = self._servers[index], self._session.folder(self.plan.servers[index].node)
        weights = _weights_path(folder) if self.learners else None
        sharing = sharing_learner(self.config, self.plan, self.plan.servers[index])
        path = folder / f"frozen{sharing}"
        frozen = None if sharing is None else self.learners[sharing].share_frozen_weights.remote(path)
        connection: ray.ObjectRef = server.connect.remote(self._address(index), weights, self.plan.max_batch, frozen)
        self.get(connection, "an inference server to be connected", self.deadlines.setup)
        self._loops[server.run.remote(self._supervision.address(self.plan.servers[index]))] = "inference server", index

    def _attaches(self, server: int) -> bool:
        return bool(self.learners) and sharing_learner(self.config, self.plan, self.plan.servers[server]) is not None

    def _actor(self, cls: type, process: Process | None = None, concurrency: int = 5) -> Any:
        """A Ray actor class with options: the plan, not Ray, decides on which node it runs and which device it sees."""
        node = process.node if process else 0
        environment = variables(self.plan, process, self._session.gpus(node))
        placed = self._session.placed(node)
        here: Any = ray.remote(working_in(Path.cwd(), cls))
        return here.options(max_concurrency=concurrency, runtime_env={"env_vars": environment}, **placed)

    def _new_server(self, process: Process) -> ActorHandle:
        return self._actor(self._roles[0], process).remote(self.config, self.spec, process, self._lock_server(process))

    def _new_worker(self, process: Process, kept: ActorHandle | None = None) -> ActorHandle:
        """Plays at once. ``kept``: a process that has played before."""
        number = process.index + self._incarnations[process.index] * len(self.plan.workers)
        worker = kept or self._actor(EnvWorkerProcess, process).remote(
            self.config, process, number, self._lock_server(process)
        )
        server = self.plan.server_of(process.index)
        position = self.plan.workers_of(server).index(process.index)
        loop = worker.run.remote(
            self._address(server), position, self.plan, self.store, self._supervision.address(process)
        )
        self._loops[loop] = ("env worker", process.index)
        return worker

    def _address(self, server: int) -> PoolAddress:
        folder = self._session.folder(self.plan.servers[server].node)
        return PoolAddress(str(folder), f"server{server}", self.plan.clients_of(server), self.plan.envs_per_worker)

    def look(self) -> None:
        """Kill processes that make no progress, as if they had died; replace those whose pause is over."""
        for killed in self._supervision.look():
            self.notify(killed)
        now = time.monotonic()
        while due := next((one for one, when in self._to_replace.items() if when <= now), None):
            del self._to_replace[due]  # first, since this is called again while a new server is waited for
            self._replace(*due)
        self.meanwhile()

    def _lock_server(self, process: Process) -> Path:
        return self._session.lock_server(process.node)

    def publish(self, policy_version: int) -> None:
        """Weight sync: publish the learner's weights to the inference servers of all nodes."""
        self._call_learners("publish", policy_version)
        self._relay(policy_version)

    def _relay(self, policy_version: int) -> None:
        pulls = [relay.pull.remote(policy_version) for relay in self._relays]
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

    def _call_learners(self, method: str, *args: Any) -> None:
        calls = [getattr(learner, method).remote(*args) for learner in self.learners]
        self.get(calls, f"the learner ({method})", self.deadlines.publish)

    def _call_servers(self, method: str) -> None:
        calls = [getattr(s, method).remote() for i, s in enumerate(self._servers) if i not in self._unconnected]
        for call in calls:
            with contextlib.suppress(ProcessDied):  # a dead server holds no device, and is replaced
                self.get(call, f"an inference server ({method})", self.deadlines.setup)

    def get(self, refs: Any, what: str, timeout: float) -> Any:
        """The results of remote calls; all processes are watched while waiting.

        An env worker or inference server that has ended is replaced; without a learner or the store, the cluster is
        at its end. Raises as ``gather``.
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
        if has_lost_another(failure):  # the worker itself is well: ``retire`` keeps it
            raise ProcessDied(f"an env worker has lost the replay store: {describe(failure)}")
        if (name := self._vital.pop(ref, None)) is not None:
            raise ProcessDied(f"the {name} died: {'it returned' if failure is None else describe(failure)}")
        role, index = self._loops.pop(ref)
        if isinstance(failure, RayTaskError) and isinstance(failure.cause, UserError):
            raise failure.cause from None
        if role == "world model":  # what it has learned is in the last checkpoint
            kind = ProcessFailed if isinstance(failure, RayTaskError) else ProcessDied
            raise kind(f"the world model's process ended: {'it returned' if failure is None else describe(failure)}")
        name = f"{role} {index}"
        reason, now = self._replacements.admit(name, failure), time.monotonic()
        pause = self._replacements.pause(name, now)
        self.notify(f"{name} is replaced{f' in {pause:.0f} s' if pause else ''}: {reason}")
        if role == "env worker":
            self.store.worker_lost.remote(index + self._incarnations[index] * len(self._workers))
            self._incarnations[index] += 1
        if pause:
            self._to_replace[role, index] = now + pause
        else:
            self._replace(role, index)

    def _replace(self, role: str, index: int) -> None:
        if role == "env worker":
            self._workers[index] = self._new_worker(self.plan.workers[index])
        else:
            self._servers[index] = self._new_server(self.plan.servers[index])
            self.get(
                self._servers[index].build.remote(self._attaches(index)), "a new inference server", self.deadlines.setup
            )
            if self._inference_offloaded:
                self._unconnected.append(index)
            else:
                self._connect(index)

    def call_store(self, method: str, *args: Any) -> Any:
        """A quick call of the store."""
        return self.get(getattr(self.store, method).remote(*args), f"the replay store ({method})", CALL_TIMEOUT_S)

    def snapshot(self, folder: Path, metadata: dict[str, Any]) -> tuple[dict[str, Any], list[ray.ObjectRef]]:
        """Copy everything that a checkpoint holds, between two updates, and begin to write it into ``folder``.

        Returns the store's counters, and calls whose results are ``Written``.
        """
        with self.learner_on_device():
            copies = [learner.snapshot.remote(folder, metadata) for learner in self.learners]
            stored: Any = self.store.snapshot.remote(folder)
            *_, record = self.get([*copies, stored], "a copy of the learner's state", self.deadlines.checkpoint)
        writers = [*self.learners, self.store, *([] if self.world_model is None else [self.world_model])]
        return record, [writer.write.remote(folder) for writer in writers]

    def has_answered(self, refs: list[ray.ObjectRef]) -> bool:
        """Whether all of these calls have ended."""
        return len(ray.wait(refs, num_returns=len(refs), timeout=0.0)[1]) == 0

    def stats(self) -> dict[str, list[dict[str, float]]]:
        """Meter totals of every process, and of the devices that several share."""
        groups = {"worker": self._workers, "server": self._servers, "learner": self.learners}
        if self.world_model is not None:
            groups["world_model"] = [self.world_model]
        use = self._session.lock_use()
        shared = [use[name] for name in self.plan.locks if name in use]
        return self._stats.ask(groups) | {"device": [{"held_s": u["held"], "waited_s": u["waited"]} for u in shared]}


def _weights_path(folder: Path) -> Path:
    return folder / "weights"


def _roles(config: RunConfig) -> tuple[type[InferenceProcess], type[LearnerProcess]]:
    if config.placement.virtual is None:
        return InferenceProcess, LearnerProcess
    from vla_rl.cluster.processes.virtual import VirtualInferenceProcess, VirtualLearnerProcess

    return VirtualInferenceProcess, VirtualLearnerProcess
