"""scripts/chaos_hosts.py: its table, and what it refuses. Runs under harm take minutes, and are the command's own."""

import pytest

from scripts.chaos_hosts import Outcome, main, table


def test_the_table_compares_with_the_time_without_harm() -> None:
    balance = {"missing": 0}
    calm = Outcome("no harm", 2.04, 0, 0, 0, 80.0, balance)
    killed = Outcome("one host killed", 61.3, 1, 2, 0, 20.0, {"missing": 3})
    lines = table([calm, killed]).splitlines()
    assert lines[2] == "| no harm | 2.0 | 0 | 0 | 0 | 80.0 | 100% | 0 |"
    assert lines[3] == "| one host killed | 61.3 | 1 | 2 | 0 | 20.0 | 25% | 3 |"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--harms", "flood"], "'flood' is none; choose from kill, cut_5"), (["--hosts", "1"], "use at least 2")],
)
def test_what_cannot_be_done_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
