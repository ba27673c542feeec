"""scripts/benchmark_peers.py: all contestants play and learn the same, and its table says what they printed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from algos.advantages import gae
from tests import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from benchmark_peers import CONTESTANTS, Contestant, chosen, compare, table
from peers.environments import NUM_BINS, chunk_env
from peers.network import Network
from peers.setting import Clock, Setting, Simulator
from peers.with_gymnasium import advantages

from vla_rl.core.errors import UserError
from vla_rl.observability.console import make_console
from vla_rl.policies.base.policy import PolicyInput


def setting(simulator: Simulator, folder: Path, steps: int | None = None) -> Setting:
    """``steps``: another time limit of episodes."""
    own = folder / simulator
    own.mkdir()
    made = Setting(simulator, 0.0, 16, 1, own)
    if steps is not None:
        made.__dict__["spec"] = replace(made.spec, max_episode_steps=steps)
    return made


def play(made: Setting) -> list[tuple]:
    """Two episodes of random tokens: what ``reset`` and ``step`` return."""
    env, rng, found = chunk_env(made, 3), np.random.default_rng(0), []
    for _ in range(2):
        seen, _ = env.reset()
        ended = False
        while not ended:
            assert env.observation_space.contains(seen)
            found.append((seen,))
            seen, *rest = env.step(rng.integers(0, NUM_BINS, env.action_space.shape))
            found.append((seen, *rest))
            ended = rest[1] or rest[2]
    env.close()
    del env
    gc.collect()  # a context that is freed later would end while another one draws
    return found


@pytest.mark.libero
def test_both_simulators_of_libero_play_the_same(tmp_path: Path) -> None:
    """Over two episodes that the time limit ends within a chunk: observations, rewards, ends, and what is counted."""
    theirs, ours = (setting(name, tmp_path, steps=12) for name in ("theirs", "ours"))
    for expected, found in zip(play(theirs), play(ours), strict=True):  # one after the other: GL contexts are global
        assert expected[1:] == found[1:]
        assert all(np.array_equal(expected[0][name], found[0][name]) for name in ("image", "numbers"))
    assert list(ours.played.read_bytes()) == list(theirs.played.read_bytes()) == [8, 4, 8, 4]


def test_the_network_rates_as_the_policy_does(tmp_path: Path) -> None:
    made = setting("tabletop", tmp_path)
    network, env = Network(made), chunk_env(made, 1)
    rows = [env.reset()[0] for _ in range(3)]
    image, numbers = (torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("image", "numbers"))
    tokens, logprobs, values = network.act(image, numbers)
    rated, entropy, again = network.rate(image.permute(0, 3, 1, 2), numbers, tokens)
    seen = PolicyInput(image[:, None], numbers[:, :-2], numbers[:, -1].long(), numbers[:, -2])
    record = {"tokens": tokens.to(torch.uint8).unflatten(1, (8, -1))}
    expected = network.policy(seen, record, made.config.policy.temperature)
    assert torch.equal(rated, expected.logprobs.sum((1, 2)))
    assert torch.equal(entropy, expected.entropy.sum((1, 2)))
    assert torch.equal(again, expected.values)
    assert torch.allclose(rated, logprobs, atol=1e-4)
    assert torch.allclose(again, values, atol=1e-5)
    assert torch.equal(network.value(image, numbers), again)
    logits, third = network.distribution(image, numbers)
    chances = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].sum(1)
    assert torch.allclose(chances, rated, atol=1e-4)
    assert torch.equal(third, again)
    assert len(set(numbers[:, -1].tolist())) > 1, "the tasks differ"


def test_the_plain_loop_has_the_projects_advantages() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 6, 1)).astype(np.float32)
    ended = torch.zeros(6, 1, dtype=torch.bool)
    ended[2] = True
    played = {"rewards": torch.tensor(rewards), "values": torch.tensor(values), "ended": ended}
    found = advantages(played | {"last_value": torch.tensor([0.7])}, 0.9, 0.8)[:, 0]
    ends = np.array([0, 3, 6]), np.array([0.0, 0.7]), np.array([False, True])
    expected, _ = gae(rewards[:, 0], values[:, 0], *ends, 0.9, 0.8)
    assert np.allclose(found.numpy(), expected, atol=1e-6)


def test_the_clock_leaves_out_the_warm_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = setting("tabletop", tmp_path)
    clock = Clock(made, "numpy")
    made.count(100)
    assert clock.goes_on(), "nothing was measured yet"
    for steps in (8, 8, 3):
        made.count(steps)
    time.sleep(0.1)
    assert not clock.goes_on()
    if not (child := os.fork()):
        clock.end()
    os.waitpid(child, 0)
    line = json.loads(capfd.readouterr().out)
    assert (line["updates"], line["chunks"], line["steps"]) == (1, 3, 19)
    assert line["steps_per_s"] == pytest.approx(19 / line["seconds"], rel=0.1)
    assert not made.folder.exists()


def test_the_table() -> None:
    ours, fast, slow = (Contestant(*name) for name in (("vla_rl", "ours"), ("sb3", "ours"), ("sb3", "theirs")))
    failed = Contestant("rllib", "ours")
    rates = {ours: [90.0, 120.0, 100.0], fast: [60.0, 60.0, 50.0], slow: [10.0, 12.0], failed: []}
    compared = compare({c: [{"steps_per_s": rate} for rate in found] for c, found in rates.items()})
    assert [c for c, _ in compared] == [ours, fast, slow]
    assert compared[1][1].ratios.tolist() == [1.5, 2.0, 2.0]
    assert compared[2][1].ratios.tolist() == [9.0, 10.0], "of the blocks that it played"
    console = make_console()
    with console.capture() as captured:
        console.print(table(compared))
    row = next(line for line in captured.get().splitlines() if "sb3" in line)
    assert [part for part in row.split() if part[0].isdigit()] == ["60.0", "2.00x", "1.50", "2.00", "3"]


def test_what_is_chosen() -> None:
    assert chosen([]) == CONTESTANTS
    assert [c.name for c in chosen(["sb3/theirs", "rllib/tabletop"])] == [
        "vla_rl/ours",
        "sb3/theirs",
        "vla_rl/tabletop",
        "rllib/tabletop",
    ]
    with pytest.raises(UserError, match="--only acme"):
        chosen(["acme"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "peer"),
    [
        ("with_sb3", "stable-baselines3"),
        pytest.param("with_torchrl", "torchrl", marks=pytest.mark.exhaustive),
    ],
)
def test_a_peer_trains(module: str, peer: str) -> None:
    """Those that the tests need anyway. All of them: bash scripts/benchmark_peers.sh."""
    command = [sys.executable, "-m", f"peers.{module}", "--simulator", "tabletop", "--seconds", "0", "--chunks", "32"]
    variables = {"PYTHONPATH": f"{ROOT}:{ROOT}/scripts", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["peer"], line["updates"], line["chunks"]) == (peer, 1, 32)
    assert 32 < line["steps"] <= 256
