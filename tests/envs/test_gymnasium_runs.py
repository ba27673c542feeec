"""A run on an environment of gymnasium that a user has beside the script, with all that may be wrong with it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import ROOT

OWN = """
    import os
    import gymnasium, numpy as np
    from gymnasium import spaces

    class Shaky(gymnasium.Env):
        resets = 0
        action_space = spaces.Box(-1, 1, (2,), np.float32)
        observation_space = spaces.Dict({
            "cam/front": spaces.Box(0, 1, (24, 24), np.float32), "at": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        })
        def __init__(self, render_mode=None):
            self.scale = 1 + os.getpid() % 1000  # another one in each process
        def seen(self):
            return {"cam/front": np.full((24, 24), 0.5, np.float32), "at": np.full(2, self.steps * self.scale, float)}
        def reset(self, seed=None, options=None):
            Shaky.resets += 1
            if Shaky.resets == 9:  # in workers, not in a probe
                raise RuntimeError("placement failed")
            self.steps = 0
            return self.seen(), {}
        def step(self, action):
            self.steps += 1
            return self.seen(), 0.0, False, False, {"solved": True} if self.steps == 3 else {}

    gymnasium.register("Shaky-v0", entry_point=Shaky, max_episode_steps=2)
"""
SCRIPT = """
    import sys
    from vla_rl import train
    if __name__ == "__main__":
        train({
            "env": {"name": "gymnasium", "id": "shaky_env:Shaky-v0", "success": "solved", "max_episode_steps": 4,
                    "image_size": 16, "start_states": 2},
            "policy": {"size": "nano", "chunk_size": 2},
            "train": {"iterations": 1, "batch_episodes": 8, "eval_episodes": 0},
            "placement": {"env_workers": 1, "envs_per_worker": 2, "max_batch": 2},
            "log": {"dir": "runs", "name": "shaky", "video": False, "tensorboard": False},
        })
"""


@pytest.mark.slow
def test_a_run_survives_a_failed_reset_and_keeps_its_ranges(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/shaky_env.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "code/script.py").write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = run("code/script.py")
    assert "images: cam/front; state: at\n" in said
    assert "success: solved in an info" in said
    assert "env worker 0 is replaced" in said
    assert "reset() has failed, RuntimeError: placement failed" in said
    folder = tmp_path / "runs/shaky"
    began = json.loads((folder / "metadata.json").read_text())["proprio_range"]
    environment["PYTHONPATH"] += f":{tmp_path / 'code'}"
    run("-m", "vla_rl.commands.cli", "train", "--resume", str(folder), "train.iterations=2")
    first, second = (
        json.loads((folder / f"checkpoints/{number:06d}/policy/statistics.json").read_text()) for number in (1, 2)
    )
    assert first == second
    assert first["proprio"]["q01"] == pytest.approx([low for low, _ in began])
