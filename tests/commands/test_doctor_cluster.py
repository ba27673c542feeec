"""`vla-rl doctor --cluster`, over two Ray nodes of this machine; tests/hosts has it over hosts."""

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.cluster.ray_nodes import RayNodes, two_ray_nodes
from vla_rl.cluster import survey
from vla_rl.cluster.survey import Facts, Link, NodeReport
from vla_rl.commands.cli import main
from vla_rl.commands.doctor_cluster import examine_nodes, table_of_nodes
from vla_rl.core.machine import GIB, Machine, code_version, interface_of

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "vla_rl": "0.1.0", "mujoco": "3.3.7"}
FACTS = Facts(VERSIONS, "c0de", 16, 64 * GIB, (), "", (30 * GIB, 32 * GIB), (90 * GIB, 99 * GIB), Path("/tmp"), "eth0")
LINK = Link(0.0004, 0.002, 0.0003, 1.1e9, 1.2e9)
HEAD = NodeReport("first", "10.0.0.1", True, 0, FACTS)
OTHER = NodeReport("second", "10.0.0.2", False, 0, FACTS, LINK)


def found(other: NodeReport, head: NodeReport = HEAD) -> list[tuple[str, str, str]]:
    return [(finding.state, finding.topic, finding.found) for finding in examine_nodes([head, other])]


def test_alike_nodes_have_nothing_wrong() -> None:
    assert found(OTHER) == []


@pytest.mark.parametrize(
    ("other", "state", "text"),
    [
        (replace(OTHER, facts=replace(FACTS, code="other")), "missing", "other source files of vla_rl than on first"),
        (
            replace(OTHER, facts=replace(FACTS, versions=VERSIONS | {"torch": "2.9.0"})),
            "missing",
            "torch 2.9.0, not 2.13.0 as on first",
        ),
        (
            replace(OTHER, facts=replace(FACTS, versions={**VERSIONS, "mujoco": "3.2"})),
            "note",
            "another mujoco than on first",
        ),
        (replace(OTHER, facts=replace(FACTS, shared=(GIB // 2, GIB))), "missing", "0.5 GiB free in /dev/shm"),
        (replace(OTHER, facts=replace(FACTS, disk=(GIB, GIB))), "note", "1.0 GiB free in /tmp"),
        (replace(OTHER, facts=replace(FACTS, memory=4 * GIB)), "note", "4.0 GiB of memory"),
        (replace(OTHER, facts=replace(FACTS, cpus=8)), "note", "8 cores, 16 on first"),
        (
            replace(OTHER, facts=replace(FACTS, interface=None)),
            "note",
            "no network interface has its address 10.0.0.2",
        ),
        (
            replace(OTHER, gpus=1, facts=replace(FACTS, gpu_problem="old driver")),
            "missing",
            "torch cannot use its GPUs",
        ),
        (replace(OTHER, link=replace(LINK, clock_s=-7.0)), "note", "its clock differs by 7 s or more"),
        (replace(OTHER, link=replace(LINK, round_trip_s=0.05)), "note", "a long way to the head: 50 ms"),
        (replace(OTHER, link=replace(LINK, to_head=1e6)), "note", "a slow link to the head: 8 Mbit/s"),
        (replace(OTHER, link=None, problem="it cannot connect", remedy="ports"), "missing", "it cannot connect"),
        (replace(OTHER, facts=None, link=None, problem="no answer", remedy="join"), "missing", "no answer"),
    ],
)
def test_what_is_wrong_with_a_node_is_named_with_its_remedy(other: NodeReport, state: str, text: str) -> None:
    assert found(other) == [(state, "second", text)]
    assert all(finding.remedy for finding in examine_nodes([HEAD, other]))


def test_a_clock_is_not_blamed_for_what_a_slow_link_hides() -> None:
    assert found(replace(OTHER, link=replace(LINK, clock_s=1.5, clock_error_s=0.8))) == []


def test_a_node_with_fewer_gpus_stops_a_run() -> None:
    ((state, nodes, text),) = found(OTHER, replace(HEAD, gpus=8))
    assert (state, nodes) == ("missing", "second")
    assert text.startswith("0 GPUs, 8 on first")


def test_nodes_with_the_same_problem_are_named_together_what_stops_a_run_first() -> None:
    full = replace(FACTS, shared=(0, GIB))
    findings = examine_nodes([replace(HEAD, facts=full), replace(OTHER, facts=replace(full, cpus=1))])
    assert [(finding.state, finding.topic) for finding in findings] == [
        ("missing", "first, second"),
        ("note", "second"),
    ]


def test_the_table_has_80_columns_and_names_every_node() -> None:
    silent = NodeReport("third", "10.0.0.3", False, 8, problem="it has not answered within 30 s")
    long = replace(OTHER, name="ip-10-0-0-2.eu-central-1.compute.internal", link=replace(LINK, clock_s=-123.4))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of_nodes([HEAD, long, long, silent]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["first", "(head)", "16", "0", "64", "30.0/32.0", "90.0"]
    assert "-123.400" in " ".join(lines)
    assert "8800" in " ".join(lines)
    assert lines[-1].split() == ["third", "?"]


def test_an_address_belongs_to_an_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None


# --- real nodes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes() -> Iterator[RayNodes]:
    with two_ray_nodes() as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.alone
def test_two_nodes_one_of_which_freezes(
    two_nodes: RayNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    assert main(["doctor", "--cluster", two_nodes.address, "--json", str(file)]) == 0
    assert "A run can use these nodes." in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["ready"] is True
    head, other = report["nodes"]
    assert (head["is_head"], other["is_head"]) == (True, False)
    for node in (head, other):
        assert node["facts"]["code"] == code_version()
        assert node["facts"]["cpus"] == Machine.detect().cpus
        assert {"python", "ray", "torch"} <= node["facts"]["versions"].keys()
    assert head["link"] is None
    assert abs(other["link"]["clock_s"]) <= other["link"]["clock_error_s"], "it is the same clock"
    assert other["link"]["round_trip_s"] < 0.05
    assert min(other["link"]["to_head"], other["link"]["from_head"]) > 1e6

    monkeypatch.setattr(survey, "ANSWER_S", 10.0)
    (node,) = two_nodes.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        assert main(["doctor", "--cluster", two_nodes.address, "--json", str(file)]) == 1
    finally:
        os.kill(raylet, signal.SIGCONT)
    shown = capsys.readouterr().out
    assert "it has not answered within 10 s" in shown
    assert "A run would stop" in shown
    report = json.loads(file.read_text())
    assert [node["facts"] is None for node in report["nodes"]] == [False, True]


def test_an_address_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster", "127.0.0.1:1"]) == 2
    assert "--cluster=127.0.0.1:1: no Ray cluster was joined there" in capsys.readouterr().err


def test_a_machine_without_a_node_is_not_kept_waiting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.cluster.ray_session.psutil.process_iter", lambda attrs: [])
    assert main(["doctor", "--cluster", "auto"]) == 2
    assert "no Ray node runs here" in capsys.readouterr().err
