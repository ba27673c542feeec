"""What Ray runs, in place of its own ``setup_worker.py``, to start a worker: it asks a fork server for one.

It uses the standard library only, so that it takes 40 ms. Where no server answers, Ray's own script starts the worker.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = "VLA_RL_FORK_SERVERS"  # the variable that names the folder of the servers' sockets
KIND = "VLA_RL_FORKS_FROM"  # the variable that names the server, among a worker's own
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def socket_of(folder: str | Path, kind: str) -> str:
    """The path of a server's socket."""
    return os.path.join(folder, kind)


def request_of(arguments: Sequence[str]) -> dict[str, object] | None:
    """What a server needs to know of a worker that Ray would start so; None if it asks for more than variables."""
    contexts = [text.removeprefix(_CONTEXT) for text in arguments if text.startswith(_CONTEXT)]
    context = json.loads(contexts[0]) if contexts else {}
    variables = context.get("env_vars") or {}
    rest = [text for text in arguments if not text.startswith((_CONTEXT, _LANGUAGE))]
    more = {name for name, value in context.items() if value and name not in ("env_vars", "py_executable")}
    if more or context.get("py_executable", sys.executable) != sys.executable or not rest or rest[0].startswith("-"):
        return None
    return {
        "kind": variables.get(KIND, "base"),
        "arguments": rest,
        "environment": dict(os.environ) | variables,
        "folder": os.getcwd(),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
    }


def is_forked(arguments: Sequence[str]) -> bool:
    """Whether a server has made the worker."""
    try:
        request = request_of(arguments)
        if request is None:
            return False
        data = json.dumps(request).encode()
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(socket_of(os.environ[FOLDER], str(request["kind"])))
            socket.send_fds(server, [len(data).to_bytes(4, "little")], [0, 1, 2])
            server.sendall(data)
            return server.recv(1) == b"."
    except (OSError, KeyError, ValueError):
        return False


if __name__ == "__main__" and not is_forked(sys.argv[1:]):
    del sys.path[0]  # the folder of this file
    import ray

    script = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[1:]])
