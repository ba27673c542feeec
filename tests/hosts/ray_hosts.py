"""A Ray cluster over hosts, as users start one: `ray start --head` on one, `ray start --address` on the others."""

import secrets
from collections.abc import Sequence
from subprocess import PIPE, STDOUT

from tests.hosts.network import Host

PORT = 6379
_STARTED_S = 90.0  # Ray's own start on a busy machine


def start_ray(head: Host, others: Sequence[Host] = (), store_mib: int = 150) -> str:
    """Start a head and the other nodes, which get a token in their environment. Returns the cluster's address.

    ``store_mib``: of each node's object store.
    """
    head.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    here = [f"--node-ip-address={head.address}", f"--port={PORT}", "--include-dashboard=false"]
    head.run(*_start(store_mib), "--head", *here, timeout=_STARTED_S)
    join(head, others, store_mib)
    return f"{head.address}:{PORT}"


def join(head: Host, others: Sequence[Host], store_mib: int = 150) -> None:
    """Let further hosts join, all at once. Raises AssertionError with what one that fails has said."""
    joining = []
    for host in others:
        trust(head, host)
        there = [f"--node-ip-address={host.address}", f"--address={head.address}:{PORT}"]
        joining.append(host.start(*_start(store_mib), *there, stdout=PIPE, stderr=STDOUT))
    for host, running in zip(others, joining, strict=True):
        said, _ = running.communicate(timeout=_STARTED_S)
        assert running.returncode == 0, f"{host.name}: {said}"


def trust(head: Host, host: Host) -> None:
    """Give a host the cluster's token."""
    host.environment |= {key: value for key, value in head.environment.items() if key.startswith("RAY_AUTH")}


def _start(store_mib: int) -> list[str]:
    return ["ray", "start", "--disable-usage-stats", "--num-cpus=0", f"--object-store-memory={store_mib << 20}"]
