"""`vla-rl benchmark simulator libero`: contestants play the same actions, and figures are computed correctly."""

import json

import pytest
from rich.console import Console

from envs.libero.benchmark_worker import Setup, random_actions
from vla_rl.commands.benchmark.simulator import _cells, _in_other_states, run_contestants
from vla_rl.commands.cli import main
from vla_rl.core.errors import UserError

TINY = Setup("libero_spatial", 0, 1, cameras=1, image_size=32, chunk_size=4)


def test_actions_are_reproducible_and_survive_float32():
    actions = random_actions(3, 50)
    assert (actions == random_actions(3, 50)).all()
    assert (actions == actions.astype("float32")).all()
    assert not (actions == random_actions(4, 50)).all()


def test_contestants_in_different_states_are_refused():
    assert _in_other_states({"one": [1.0, 2.0], "two": [1.0, 2.0]}) == set()
    with pytest.raises(UserError, match="two and one"):
        _in_other_states({"one": [1.0, 2.0], "two": [1.0, 2.1]})
    assert _in_other_states({"one": [1.0], "lerobot, soft resets": [1.1]}) == {"lerobot, soft resets"}


def test_cells_compare_with_the_first():
    assert _cells([10.0, 4.0, None]) == ["10.00", "4.00 (2.5x)", "-"]


def test_a_contestant_that_cannot_start_says_why():
    with pytest.raises(UserError, match=r"vla_rl failed:[\s\S]*libero_spatial"):
        run_contestants(Setup("libero_spatial", 99, 1, 1, 32, 4), ["vla_rl"], 1, Console(quiet=True))


@pytest.mark.slow
@pytest.mark.libero
def test_the_reference_environment_arrives_at_the_same_states_later():
    result = run_contestants(TINY, ["vla_rl", "hf-libero"], 1, Console(quiet=True))
    json.dumps(result)
    ours, theirs = (result["seconds"][name] for name in ("vla_rl", "hf-libero"))
    # The fastest of a few measurements, since another job on the same cores delays single ones several times over.
    assert min(ours["bare"]) < min(
        *ours["blind_chunk"], *ours["chunk"]
    )  # a drawing takes too little to be told from noise
    for what in ("chunk", "blind_chunk", "reset", "switch"):
        assert min(theirs[what]) > min(ours[what]), what
    memory = [ours["memory"], theirs["memory"]]
    assert memory[0]["env"] < memory[1]["env"] < memory[1]["process"]


def test_an_unknown_suite_is_a_mistake_of_the_user(capsys):
    assert main(["benchmark", "simulator", "libero", "--suite", "libero_100"]) == 2
    assert "libero_100: LIBERO has libero_spatial" in capsys.readouterr().err


def test_an_unknown_benchmark_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["benchmark", "nothing"])
    assert stop.value.code == 2
    assert "overlap" in capsys.readouterr().err
