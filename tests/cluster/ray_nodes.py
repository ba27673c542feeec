"""Several Ray nodes on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.cluster_utils import Cluster as RayNodes

NODE = {"num_cpus": 0, "object_store_memory": 200 << 20}


@contextmanager
def two_ray_nodes(**head: Any) -> Iterator[RayNodes]:
    """``head``: further options of the head's node."""
    nodes = RayNodes(initialize_head=True, head_node_args=NODE | head)
    try:
        nodes.add_node(**NODE)
        yield nodes
    finally:
        nodes.shutdown()
