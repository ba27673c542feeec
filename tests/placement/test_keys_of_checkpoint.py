"""Observations and chunk size follow the policy's checkpoint: one key, ``policy.checkpoint``, is enough."""

from pathlib import Path

import pytest

from envs import env_spec
from tests.policies.openvla_twins import LAYOUTS
from vla_rl.core.errors import UserError
from vla_rl.placement.checks import load_checked_config
from vla_rl.policies.build import build_policy, check_policy, save_policy


def observed(checkpoint: Path | str, policy: dict[str, int] | None = None, **env: bool) -> tuple[bool, bool, int]:
    values = {"env": env, "policy": {"checkpoint": str(checkpoint), **(policy or {})}}
    config = load_checked_config({"base": "configs/libero_ppo.yaml", **values})
    check_policy(config.policy, env_spec(config.env))
    return config.env.wrist_camera, config.env.proprio, config.policy.chunk_size


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("openvla", (False, False, 1)),
        ("openvla-oft", (False, True, 8)),
        ("openvla-oft-l1", (True, True, 8)),
        ("simplevla-rl", (False, False, 8)),
        ("rl4vla-lora", (False, False, 1)),
        ("rlinf", (False, False, 2)),  # it says so; others do not, and have the usual 8
    ],
)
def test_of_published_folders(layout: str, expected: tuple[bool, bool, int], tmp_path: Path) -> None:
    assert observed(LAYOUTS[layout](tmp_path / "twin", 0)) == expected


def test_of_a_checkpoint_of_this_project(tmp_path: Path) -> None:
    policy = {"checkpoint": None, "size": "nano", "chunk_size": 2}
    for seen in ({"wrist_camera": True, "proprio": False}, {"wrist_camera": False, "proprio": True}):
        config = load_checked_config({"base": "configs/libero_ppo.yaml", "env": seen, "policy": policy})
        folder = tmp_path / f"{seen['proprio']}"
        save_policy(config.policy, build_policy(config.policy, env_spec(config.env), 0), folder, {})
        assert observed(folder) == (seen["wrist_camera"], seen["proprio"], 2)


def test_a_key_that_is_given_stays_and_is_checked(tmp_path: Path) -> None:
    folder = LAYOUTS["openvla"](tmp_path / "twin", 0)
    with pytest.raises(UserError, match=r"made for proprio_dim=0, the run has 8 \(set env.proprio=false\)"):
        observed(folder, proprio=True)


def test_more_actions_than_were_learned_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = LAYOUTS["openvla"](tmp_path / "twin", 0)
    assert observed(folder) == (False, False, 1)
    assert not caplog.records
    assert observed(folder, {"chunk_size": 4}) == (False, False, 4)
    assert [r.getMessage() for r in caplog.records] == [
        f"policy.checkpoint={folder} learned chunks of 1, and policy.chunk_size=4"
    ]


def test_a_broken_checkpoint_is_told_by_its_own_check(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"architecture\.json is missing there"):
        observed(tmp_path / "empty")
