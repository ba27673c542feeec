"""Hosts for tests, where the system lets them be made."""

from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, obstacle


@pytest.fixture(scope="session")
def _can_make_hosts() -> None:
    if reason := obstacle():
        pytest.skip(f"no hosts can be made here: {reason}")


@pytest.fixture(scope="module")
def network(_can_make_hosts: None) -> Iterator[Network]:
    with Network() as network:
        yield network
