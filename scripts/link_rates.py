"""What share of a link's rate weights and episodes get, between two hosts out of Linux namespaces.

    python scripts/link_rates.py [--links 0,100mbit,1000mbit] [--mib 64] [--times 5] [--json FILE]

Needs root (tests/hosts). Weights travel as in a run: the relay of weights on the other host pulls them from where they
were published. Episodes travel the other way, as an env worker sends them. "raw" is one TCP connection with nothing
else. All three take turns.
"""

import argparse
import json
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests import ROOT
from tests.hosts.network import Network, obstacle, shape_of
from tests.hosts.ray_hosts import start_ray
from vla_rl.cluster.processes.env_worker import StoreClient
from vla_rl.cluster.processes.weight_relay import WeightRelayProcess
from vla_rl.commands.metadata import git_commit, machine_record
from vla_rl.core.files import write_json
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers
from vla_rl.placement.plan import Process

_EPISODE_MIB = 2  # 16 chunks, with two views of 224 pixels: 4.8; with one of 96: 0.4
_INSIDE = "--inside"  # how this file is started on the first host
_DEADLINE_S = 600.0


class Learner:
    """Publishes as a learner does."""

    def __init__(self, path: Path, nbytes: int) -> None:
        create_weight_buffers(path, nbytes)
        self._publisher, self._reader = WeightPublisher(path), WeightReader(path)
        self._weights = torch.randn(nbytes // 4)

    def publish(self, version: int) -> None:
        self._publisher.publish(version, [self._weights])

    def weights_nbytes(self) -> int:
        return self._reader.nbytes

    def bucket(self, version: int, number: int) -> np.ndarray | None:
        return self._reader.bucket(version, number)


class Store:
    """Takes episodes."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, worker: int, episode: dict[str, np.ndarray]) -> bool:
        self._nbytes += sum(array.nbytes for array in episode.values())
        return True

    def taken(self) -> int:
        return self._nbytes


class Other:
    """On the other host: an env worker, and the end of a plain connection."""

    def send(self, store: Any, count: int) -> None:
        client, rng = StoreClient(store), np.random.default_rng(0)
        episode: Any = {"images": rng.integers(256, size=_EPISODE_MIB << 20, dtype=np.uint8)}
        for _ in range(count):
            client.add(0, episode)
        while ray.get(store.taken.remote()) < count * episode["images"].nbytes:
            time.sleep(0.001)

    def take(self, host: str, port: int, nbytes: int) -> None:
        with socket.create_connection((host, port)) as connection:
            left = nbytes
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))


def transfer(address: str, mib: int, times: int) -> dict[str, list[float]]:
    """Megabits of payload per second, on the first of two hosts; by what is sent."""
    ray.init(address=address, logging_level=logging.ERROR)
    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    (there,) = nodes.keys() - {here}

    nbytes, found = mib << 20, dict[str, list[float]](raw=[], weights=[], episodes=[])
    with tempfile.TemporaryDirectory() as folder:
        learner, other = _on(here, Learner, Path(folder, "published"), nbytes), _on(there, Other)
        relayed = Path(folder).with_suffix(".relayed")  # a name that is new on the other host, too
        relay = _on(there, WeightRelayProcess, Process("weight relay", 1, "cpu", (), 1, None), relayed)
        ray.get(learner.publish.remote(0))
        ray.get(relay.connect.remote(learner))
        with socket.create_server((nodes[here], 0)) as server:
            for version in range(1, times + 1):
                start = time.perf_counter()
                taking = other.take.remote(nodes[here], server.getsockname()[1], nbytes)
                connection, _ = server.accept()
                connection.sendall(bytes(nbytes))
                ray.get(taking)
                connection.close()
                found["raw"].append(8e-6 * nbytes / (time.perf_counter() - start))
                ray.get(learner.publish.remote(version))
                start = time.perf_counter()
                ray.get(relay.pull.remote(version))
                found["weights"].append(8e-6 * nbytes / (time.perf_counter() - start))
                store, count = _on(here, Store), mib // _EPISODE_MIB
                ray.get(store.taken.remote())
                start = time.perf_counter()
                ray.get(other.send.remote(store, count))
                found["episodes"].append(8e-6 * nbytes / (time.perf_counter() - start))
                ray.kill(store)
    return found


def _on(node: str, kind: type, *arguments: Any) -> Any:
    """An actor on a node."""
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 17}
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(kind).options(scheduling_strategy=place, **options).remote(*arguments)


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """In Markdown; medians, and shares of a plain connection in the same turn."""
    lines = [
        "| link | raw, Mbit/s | weights, Mbit/s | | episodes, Mbit/s | |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for link, rates in found.items():
        cells = [f"{median(rates['raw']):.0f}"]
        for name in ("weights", "episodes"):
            share = median(rate / raw for rate, raw in zip(rates[name], rates["raw"], strict=True))
            cells += [f"{median(rates[name]):.0f}", f"{share:.0%}"]
        lines.append(f"| {link} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--links", type=lambda text: text.split(","), default=["0", "100mbit", "1000mbit"])
    parser.add_argument("--mib", type=int, default=64, help="of weights, and of episodes")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(_INSIDE, metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.inside:
        print(json.dumps(transfer(args.inside, args.mib, args.times)))
        return 0
    if reason := obstacle():
        parser.error(f"no hosts can be made here: {reason}")
    found = {}
    with Network() as network:
        head, other = network.host("head"), network.host("other")
        address = start_ray(head, [other], store_mib=512)
        sizes = ["--mib", str(args.mib), "--times", str(args.times)]
        for link in args.links:
            other.shape(**shape_of(link))
            command = [sys.executable, str(ROOT / "scripts/link_rates.py"), _INSIDE, address, *sizes]
            found[link] = json.loads(head.run(*command, timeout=_DEADLINE_S).splitlines()[-1])
            print(table(found), flush=True)
    if args.json:
        write_json(args.json, {"machine": machine_record(), "git_commit": git_commit(), "mbit_per_s": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
