"""A run that loses its learner or its store goes on without loading simulators and policies again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import yaml

from vla_rl.cluster.calls import ProcessDied
from vla_rl.commands import train as train_module
from vla_rl.commands.chaos.training_run import ledger
from vla_rl.commands.recovery import Start
from vla_rl.commands.train import run_training
from vla_rl.config.run_config import RunConfig
from vla_rl.core.faults import VARIABLE, order
from vla_rl.observability.callbacks import Callback

LEARNER, STORE, KEPT = "ray::LearnerProc", "ray::StoreProces", ("ray::EnvWorkerPr", "ray::InferenceP")
RAYLET = "raylet"


def processes() -> dict[str, set[int]]:
    """Process ids by the first letters of a name, which Linux cuts off."""
    found: dict[str, set[int]] = {}
    for process in psutil.Process().children(recursive=True):
        found.setdefault(process.name()[:15], set()).add(process.pid)
    return {name: found.get(name[:15], set()) for name in (LEARNER, STORE, *KEPT, RAYLET)}


class Killer(Callback):
    """Kills a process after some iterations."""

    def __init__(self, victims: Mapping[int, str]) -> None:
        self.victims, self.seen = victims, dict[int, dict[str, set[int]]]()

    def on_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if iteration in self.seen:  # again, after going back
            return
        self.seen[iteration] = processes()
        for pid in self.seen[iteration][self.victims[iteration]] if iteration in self.victims else ():
            psutil.Process(pid).kill()


class Scripted:
    """A cluster and its trainer, which fail."""

    def __init__(self, can_retire: bool) -> None:
        self.can_retire, self.retired, self.policy_version = can_retire, 0, 0

    def retire(self) -> bool:
        self.retired += 1
        return self.can_retire

    def start(self, checkpoint: object, state: dict[str, int], trajectories: object) -> None:
        self.policy_version = state["policy_version"]


@pytest.mark.parametrize("can_retire", [True, False])
def test_only_progress_allows_to_keep_anything(can_retire: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    updates, failed, cluster = [3, 0], list[Exception](), Scripted(can_retire)

    def main_loop(trainer: Scripted) -> bool:
        trainer.policy_version += updates.pop(0)
        raise ProcessDied(f"at version {trainer.policy_version}")

    def recover(error: Exception) -> Start:
        failed.append(error)
        return Start(state={"policy_version": 2})

    monkeypatch.setattr(train_module, "main_loop", main_loop)
    with pytest.raises(ProcessDied, match="at version 2" if can_retire else "at version 3"):
        train_module._run_on(cluster, Start(), lambda _: cluster, recover)  # type: ignore[arg-type,return-value]
    assert cluster.retired == 1, "not after a start without an update"
    assert [str(error) for error in failed] == (["at version 3"] if can_retire else [])


CRASHING = """
import os
import numpy as np
from envs.base import EnvInstance, SequentialEnv, SimulatorConfig
from vla_rl.core.actions import end_effector
from vla_rl.core.records import EnvSpec

class Crashing(SequentialEnv[EnvInstance]):
    class Config(SimulatorConfig):
        image_size: int = 32

    def __init__(self, config, num_envs):
        super().__init__(self.env_spec(config), num_envs)

    @staticmethod
    def env_spec(config):
        seen = {"views": ("top",), "image_size": 32, "proprio_dim": 1, "actions": end_effector(), "init_states": 1}
        return EnvSpec(name="crashing", max_episode_steps=4, instructions=("fall over",), **seen)

    def _start(self, env_id, episode, previous):
        return EnvInstance(episode)

    def _images(self, instance):
        return np.zeros((1, 32, 32, 3), np.uint8)

    def _proprio(self, instance):
        return np.zeros(1)

    def _advance(self, instance, action):
        os._exit(11)
"""


@pytest.mark.slow
def test_a_simulator_that_kills_its_process_at_each_start_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    values = {
        "env": {"name": "crashing:Crashing"},
        "policy": {"size": "nano", "chunk_size": 4},
        "train": {"batch_episodes": 2, "eval_episodes": 0},
        "placement": {"env_workers": 1, "envs_per_worker": 2},
        "log": {"dir": str(tmp_path), "name": "run"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "vla_rl.commands.cli", "train", "config.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    (error,) = [line for line in ended.stderr.splitlines() if "error:" in line]
    assert "env worker 0 died 5 times without getting anywhere, as did every other env worker" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_is_loaded_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of a simulator costs the simulator, not the process that has loaded its libraries."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    order(tmp_path, "exception")
    values = {
        "env": {"name": "workload", "image_size": 24, "max_episode_steps": 8, "step_ms": 1.0},
        "policy": {"name": "openvla_oft", "size": "nano", "chunk_size": 8},
        "train": {"iterations": 20, "batch_episodes": 4, "eval_episodes": 0, "checkpoint_every": 1},
        "placement": {"env_workers": 2, "envs_per_worker": 2},
        "log": {"dir": str(tmp_path), "name": "run", "video": False, "tensorboard": False},
    }
    killer = Killer({2: LEARNER, 4: STORE, 6: RAYLET})
    result = run_training(RunConfig.model_validate(values), callbacks=[killer])
    assert (result.iterations, result.metrics[-1]["restarts_of_run"]) == (20, 2), "the store is replaced alone"
    assert [m["iteration"] for m in result.metrics] == list(range(1, 21)), "and every metric once"
    assert not (tmp_path / "exception").exists()
    assert result.metrics[0]["restarts"] + result.metrics[1]["restarts"] > 0, "a worker plays under another number"
    first, between, last, without_ray = (killer.seen[i] for i in (1, 3, 6, 20))
    for name in KEPT:
        assert len(first[name]) == (2 if name.startswith("ray::Env") else 1)
        assert first[name] == between[name] == last[name], "the same processes"
    assert len({*first[STORE], *between[STORE], *last[STORE]}) == 3, "a new one each time"
    assert first[LEARNER] != between[LEARNER] == last[LEARNER], "new with the run, not with the store"
    assert not any(last[name] & without_ray[name] for name in last), "without Ray, nothing goes on"
    assert not any(psutil.pid_exists(pid) for pids in last.values() for pid in pids)
    assert all(ledger(m)["missing"] == 0 for m in result.metrics)
    assert ledger(result.metrics[-1])["trained"] == 80
    assert capsys.readouterr().out.count("an env worker: it is about to fail, by chaos") == 1
