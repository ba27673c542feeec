"""The commands over several hosts: their tables, and what they refuse. Their runs take minutes."""

from types import ModuleType

import pytest

from scripts import chaos_hosts, link_rates, try_hosts
from scripts.chaos_hosts import Outcome
from scripts.try_hosts import Measured
from tests.hosts.network import shape_of


def test_the_table_compares_with_the_time_without_harm() -> None:
    calm = Outcome("no harm", 2.04, 0.5, 0, 0, 0, 0, 80.0, {"missing": 0})
    killed = Outcome("power of one host fails", 61.3, 9.8, 1, 2, 0, 7, 20.0, {"missing": 3})
    lines = chaos_hosts.table([calm, killed]).splitlines()
    assert lines[2] == "| no harm | 2.0 | 0.5 | 0 | 0 | 0 | 0 | 80.0 | 100% | 0 |"
    assert lines[3] == "| power of one host fails | 61.3 | 9.8 | 1 | 0 | 2 | 7 | 20.0 | 25% | 3 |"
    assert len({line.count("|") for line in lines}) == 1


def test_ways_are_compared_within_a_seed() -> None:
    def run(way: str, seed: int, rate: float) -> Measured:
        return Measured(way, seed, rate, 10.0, 1.5, 8.0, 3.5, 2.0, 64, (0.25, 0.8 + 0.01 * seed), 0)

    runs = [run("one host", 1, 100.0), run("10", 1, 50.0), run("one host", 2, 10.0), run("10", 2, 6.0)]
    lines = try_hosts.table(runs).splitlines()
    assert lines[2] == "| one host | 55.0 | 1.00 | 10.0 | 1.5 | 8.0 | 3.5 | 2.0 | 25 → 81, 25 → 82 |"
    assert lines[3].startswith("| 10 | 28.0 | 0.55 |")


def test_shares_are_of_a_plain_connection_in_the_same_turn() -> None:
    rates = {"raw": [100.0, 50.0, 80.0], "weights": [90.0, 45.0, 80.0], "episodes": [50.0, 25.0, 20.0]}
    line = link_rates.table({"100mbit": rates}).splitlines()[-1]
    assert line == "| 100mbit | 80 | 80 | 90% | 25 | 50% |"


def test_cables() -> None:
    assert [shape_of(way) for way in ("0", "2.5", "100mbit")] == [{}, {"round_trip_ms": 2.5}, {"mbit": 100.0}]


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        (chaos_hosts, ["--harms", "flood"], "'flood' is none; choose from kill, late"),
        (chaos_hosts, ["--hosts", "2"], "use at least 3"),
        (try_hosts, ["configs/tabletop.yaml", "--links", "fast"], "write 10 for 10 ms, or 100mbit"),
        (try_hosts, ["configs/tabletop.yaml", "--hosts", "1"], "use at least 2"),
    ],
)
def test_what_cannot_be_done_is_refused(
    script: ModuleType, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
