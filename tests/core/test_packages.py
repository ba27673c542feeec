from pathlib import Path

import pytest

from vla_rl.core import packages
from vla_rl.core.packages import install_command


def test_a_checkout_sets_itself_up():
    assert install_command("libero") == "bash scripts/setup.sh"


def test_elsewhere_the_remedy_names_packages_of_the_index_and_not_vla_rl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packages, "_SETUP", tmp_path / "setup.sh")
    declared = [
        "torch>=2.7",
        "mujoco<3.9,>=3.2; extra == 'libero'",
        'numba; extra == "libero"',
        "wandb; extra == 'wandb'",
    ]
    monkeypatch.setattr(packages, "requires", lambda name: declared)
    assert install_command("libero") == (
        "pip install 'mujoco<3.9,>=3.2' numba && pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1"
    )
    assert install_command("wandb") == "pip install wandb"
