"""Off-policy algorithms learn, with critic and memory, in the parts of a run: a point that has to come near another."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tests.thread_runtime import thread_run
from vla_rl.config.loading import load_config

SETTINGS = """
    env:
      name: gymnasium
      id: {name}:Near-v0
      max_episode_steps: 4
      image_size: 16
      start_states: 50
    policy: {policy}
    algo:
      <<: {algo}
      critic_reads: features
      gamma: 0.9
      target_rate: 0.02
      updates_per_step: 1.0
      batch: 64
      critics: 2
      critic_width: 128
      critic_warmup: 200
      actor_every: 2
    train: {{iterations: 12, batch_episodes: 32, eval_episodes: 100}}
    learner: {{lr: 1.0e-3, value_lr: null}}
    placement: {{env_workers: 1, envs_per_worker: 8, max_batch: 8}}
"""


class Near(gymnasium.Env):  # type: ignore[type-arg]
    """The other is seen 0.45 away. A step is up to 0.2 along each axis, and 0.2 is near. Random weights fail."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)
    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (16, 16, 3), np.uint8), "other": spaces.Box(-3, 3, (2,), np.float32)}
    )

    def __init__(self, **settings: Any) -> None:
        self.other = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None):  # type: ignore[no-untyped-def]
        super().reset(seed=seed)
        angle = self.np_random.uniform(0, 2 * np.pi)
        self.other = 0.45 * np.array([np.cos(angle), np.sin(angle)])
        return self._seen(), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        self.other = self.other - 0.2 * np.clip(action, -1, 1)
        near = bool(np.linalg.norm(self.other) < 0.2)
        return self._seen(), float(near), near, False, {"is_success": near}

    def _seen(self) -> dict[str, np.ndarray]:
        return {"camera": np.zeros((16, 16, 3), np.uint8), "other": self.other.astype(np.float32)}


gymnasium.register("Near-v0", entry_point=Near, max_episode_steps=4)


GAUSSIAN = "{name: gaussian, chunk_size: 2, train_cameras: false}"
FLOW = "{name: pi0, chunk_size: 2, steer: {}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "policy"),
    [
        ("{name: td3_bc}", GAUSSIAN),
        pytest.param("{name: sac, cloning: 1.0}", GAUSSIAN, marks=pytest.mark.exhaustive),
        ("{name: dsrl}", FLOW),
    ],
    ids=["td3_bc", "sac", "dsrl"],
)
def test_a_policy_that_fails_learns_to_succeed(algo: str, policy: str, tmp_path: Path) -> None:
    """DSRL's flow policy has random weights, and keeps them: what is learned is the noise that it needs."""
    file = tmp_path / "point.yaml"
    file.write_text(textwrap.dedent(SETTINGS).format(name=__name__, algo=algo, policy=policy))
    config = load_config(file)
    with thread_run(config, tmp_path) as run:
        before = run.evaluate()
        for _ in range(config.train.iterations):
            run.update()
        after = run.evaluate()
    assert max(before.values()) < 0.2
    assert min(after.values()) > 0.35, after
