"""A session in a hostile environment, for test_session: prints what its processes see, as JSON.

Run as a script in a folder with packages named like ours, with a long TMPDIR, and with RAY_ADDRESS set.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil


class Probe:
    def look(self) -> dict:
        import algos
        import envs
        import vla_rl

        files = [str(Path(str(module.__file__)).parents[1]) for module in (algos, envs, vla_rl)]
        return {"code": files, "folder": os.getcwd(), "pid": os.getpid()}

    def hang(self) -> None:
        time.sleep(600)

    def take_part(self, rank: int) -> None:
        """In a collective of three ranks: one has too little memory, one notices that, one hangs."""
        if rank == 0:
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:4711")
        time.sleep(0.5 if rank == 1 else 600)
        raise MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def failed_update(actor: Any) -> dict:
    """What is reported of it, and after how long."""
    from vla_rl.cluster.calls import ProcessFailed, gather

    start = time.monotonic()
    try:
        gather([actor.take_part.remote(rank) for rank in (2, 0, 1)], "the learner's update", 600.0)
    except ProcessFailed as error:
        return {"failure": str(error), "failure_s": time.monotonic() - start}
    raise AssertionError("nothing was reported")


def hung_node(session: Any, actor: Any) -> dict:
    """How long the driver is held up by a node that hangs, and what it says of it in the end."""
    from vla_rl.cluster import ray_session
    from vla_rl.cluster.calls import ProcessDied

    session._others, session._nodes = {1: actor}, {0: "here, 10.0.0.1", 1: "there, 10.0.0.2"}
    start = time.monotonic()
    answers = [session.ask(1, "hang") for _ in range(3)]
    seconds = time.monotonic() - start
    ray_session.CALL_TIMEOUT_S = ray_session._LAST_CHANCE_S = 0.2
    time.sleep(0.3)
    try:
        session.ask(1, "hang")
    except ProcessDied as error:
        return {"hung": str(error), "hung_answers": answers, "hung_s": seconds}
    finally:
        session._others = {}
    raise AssertionError("nothing was reported")


def answer_to(token: str | None, address: str) -> str:
    """How Ray answers a question of somebody who knows this token: a status of gRPC."""
    import grpc

    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"


def main() -> None:
    import vla_rl.cluster

    assert vla_rl.cluster  # imported before Ray, it makes a token
    look_at_session()


def look_at_session() -> None:
    import ray

    from tests.cluster import probe
    from tests.processes import answers, listening
    from vla_rl.cluster.processes.common import working_in
    from vla_rl.cluster.ray_session import RaySession
    from vla_rl.config.run_config import RunConfig

    session = RaySession(RunConfig(), 80 << 20)
    try:
        actor = ray.remote(working_in(Path.cwd(), probe.Probe))
        actor = actor.options(max_concurrency=4, **session.placed(0)).remote()
        seen = ray.get(actor.look.remote(), timeout=60)
        others = psutil.Process().children(recursive=True)
        seen["listens"] = sorted(listening([psutil.Process(), *others]))
        answers(others, lambda process: process.send_signal(signal.SIGTERM))
        time.sleep(1)
        again = ray.get(actor.look.remote(), timeout=60)
        states = answers(others, lambda process: (process.name(), process.status()))
        alive = sorted(name for name, status in states if status != psutil.STATUS_ZOMBIE)
        address = ray.get_runtime_context().gcs_address
        seen["answers"] = [answer_to(token, address) for token in (os.environ["RAY_AUTH_TOKEN"], None, "0" * 64)]
        seen |= hung_node(session, actor) | failed_update(actor)
        here = str(session.folder(0))
    finally:
        session.close()
    told = {"again": again["pid"], "alive": alive}
    print(json.dumps(seen | told | {"left": Path(here).exists()}))


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry]
    main()
