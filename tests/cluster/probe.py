"""A session in a hostile environment, for test_session: prints what its processes see, as JSON.

Run as a script in a folder with packages named like ours, with a long TMPDIR, and with RAY_ADDRESS set.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil


class Probe:
    def look(self) -> dict:
        import algos
        import envs
        import vla_rl

        files = [str(Path(str(module.__file__)).parents[1]) for module in (algos, envs, vla_rl)]
        return {"code": files, "folder": os.getcwd(), "pid": os.getpid()}


def main() -> None:
    import ray

    from tests.cluster import probe
    from vla_rl.cluster.processes.common import working_in
    from vla_rl.cluster.ray_session import RaySession
    from vla_rl.config.run_config import RunConfig

    session = RaySession(RunConfig(), 80 << 20)
    try:
        actor = ray.remote(working_in(Path.cwd(), probe.Probe)).options(**session.placed(0)).remote()
        seen = ray.get(actor.look.remote(), timeout=60)
        others = psutil.Process().children(recursive=True)
        for process in others:
            process.send_signal(signal.SIGTERM)
        time.sleep(1)
        again = ray.get(actor.look.remote(), timeout=60)
        alive = [p.name() for p in others if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        here = str(session.folder(0))
    finally:
        start = time.monotonic()
        session.close()
    told = {"again": again["pid"], "processes": len(others), "alive": len(alive), "close_s": time.monotonic() - start}
    print(json.dumps(seen | told | {"left": Path(here).exists()}))


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry]
    main()
