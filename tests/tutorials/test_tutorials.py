"""The code of docs/api.md and docs/tutorials/ runs as it stands there, and the parts it defines train a policy."""

from __future__ import annotations

import dataclasses
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from algos import make_algorithm
from envs import env_spec, make_env
from envs.base import empty_observation
from tests import ROOT
from vla_rl import Callback, RunConfig, TrainResult, evaluate, load_config, load_policy, train
from vla_rl.core import plugins
from vla_rl.core.errors import UserError
from vla_rl.core.records import EpisodeSpec
from vla_rl.policies.base.export import Export
from vla_rl.policies.build import build_policy, check_policy, export_policy, policy_sizes, save_policy

TUTORIALS = ("own_environment", "own_policy", "own_algorithm")
LONGEST = 60  # lines of user code


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)


def forget() -> None:
    for cached in (plugins.installed, plugins.load_plugin, plugins.plugin_config):
        cached.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of a user who has saved the files of all tutorials."""
    root = tmp_path_factory.mktemp("tutorials")
    for tutorial in TUTORIALS:
        for language in ("python", "yaml"):
            for text in blocks(f"tutorials/{tutorial}.md", language):
                name = re.match(r"# file: (\S+)\n", text)
                assert name is not None, "each block of a tutorial says which file it is"
                (root / name[1]).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(sys, "path", list(sys.path))
        yield root
    forget()


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_a_tutorial_is_short(tutorial: str) -> None:
    (code,) = blocks(f"tutorials/{tutorial}.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) < LONGEST


@pytest.mark.parametrize("tutorial", TUTORIALS)
def test_its_commands_have_valid_configs(tutorial: str, folder: Path) -> None:
    for line in "".join(blocks(f"tutorials/{tutorial}.md", "bash")).splitlines():
        program, command, file, *overrides = shlex.split(line, comments=True)
        assert (program, command in ("train", "sft")) == ("vla-rl", True)
        assert isinstance(load_config(file, overrides), RunConfig)


def test_own_parts_travel_by_name(folder: Path) -> None:
    """A process that has imported none of it gets the config, and finds the parts."""
    config = load_config("reach_square.yaml", {"algo": "quantile_ppo:QuantilePPO", "algo.quantile": 0.2})
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.env.model_copy(update={"reach": 0.3}).reach == 0.3
    code = (
        "import pickle, sys; config = pickle.loads(sys.stdin.buffer.read()); from envs import make_env;"
        "print(type(make_env(config.env, 1)).__name__, config.env.reach, config.algo.quantile, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(config), capture_output=True, cwd="/", check=False
    )
    assert done.stdout.decode().split() == ["ReachSquare", "0.1", "0.2", "False"], done.stderr.decode()


def test_the_environment_follows_the_interface(folder: Path) -> None:
    config = load_config("reach_square.yaml").env
    env, spec = make_env(config, 2), env_spec(config)
    assert env.spec == spec
    env.reset([0, 1], [EpisodeSpec(0, 0, 5), EpisodeSpec(1, 1, 5, init_state=3, record=True)])
    seen = empty_observation(spec, 2)
    env.observe([0, 1], seen)
    assert (seen.images[0] != seen.images[1]).any()
    steps = 0
    while env.instance(1).running:  # type: ignore[attr-defined]
        instance = env.instance(1)  # type: ignore[attr-defined]
        actions = np.zeros((1, 4, 2), np.float32)
        actions[0] = np.sign(instance.squares[1] - instance.at)
        result = env.step([1], actions)
        steps += int(result.num_steps[0])
    assert result.terminated[0] != result.truncated[0]
    assert result.rewards.sum() == result.success[0]
    assert len(env.frames(1)) == steps <= spec.max_episode_steps


def test_the_policy_learns_and_is_read_back(folder: Path, tmp_path: Path) -> None:
    import torch

    from vla_rl.policies.base.policy import PolicyInput

    config = load_config("small_policy.yaml")
    spec = env_spec(config.env)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-0.5, 2.0, (32, spec.action_dim)).astype(np.float32)
    proprio = rng.random((32, spec.proprio_dim)).astype(np.float32)
    policy = build_policy(config.policy, spec, seed=1)
    policy.set_statistics(actions, proprio)
    n, size = 6, spec.image_size
    images = torch.from_numpy(rng.integers(0, 256, (n, 1, size, size, 3), np.uint8))
    seen = PolicyInput(images, torch.from_numpy(proprio[:n]), torch.zeros(n, dtype=torch.int32), torch.zeros(n))
    draws = {"noise": torch.randn(n, 4, spec.action_dim)}
    greedy = torch.arange(n) % 2 == 0
    chosen = policy.act(seen, draws, greedy, 0.7)
    rated = policy.forward(seen, chosen.record, 0.7)
    assert torch.allclose(rated.logprobs, chosen.logprobs, atol=1e-5), "sampling and training agree"
    assert torch.allclose(rated.values, chosen.values, atol=1e-6)
    reference = torch.distributions.Normal(0.0, 0.5 * 0.7).log_prob(draws["noise"][1] * 0.5 * 0.7)
    assert torch.allclose(rated.logprobs[1], reference, atol=1e-4)
    record = policy.encode(actions[None, :4], rng)
    assert np.abs(record["actions"]).max() <= 1 + 1e-5
    assert np.allclose(policy.decode(record), actions[None, :4], atol=1e-5)

    wanted, mask = np.tile(actions[:1], (n, 4, 1)), torch.ones(n, 4, dtype=torch.bool)
    optimizer = torch.optim.Adam(policy.trunk_parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = policy.imitation_loss(seen, wanted, mask, rng, 0.0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]

    save_policy(config.policy, policy, tmp_path / "saved", {"from": "a test"})
    loaded = config.policy.model_copy(update={"checkpoint": str(tmp_path / "saved")})
    check_policy(loaded, spec)
    again = build_policy(loaded, spec, seed=2)
    same = again.act(seen, draws, greedy, 0.7)
    assert torch.equal(same.record["actions"], policy.act(seen, draws, greedy, 0.7).record["actions"])
    request = Export(tmp_path / "saved", "native", tmp_path / "out", config.policy, lambda: spec)
    with pytest.raises(UserError, match="can be written as native"):
        export_policy(dataclasses.replace(request, format="lora"))
    export_policy(request)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "saved/model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"chunk_size=4, not 2"):
        check_policy(loaded.model_copy(update={"chunk_size": 2}), spec)
    sizes = policy_sizes(config.policy, spec, 4)
    assert sizes.trained == sum(p.numel() for p in policy.parameters())
    assert sizes.train_each > sizes.saved_each > images[0].numel()


def test_the_algorithm_is_made_from_its_config(folder: Path) -> None:
    algorithm = make_algorithm(load_config("quantile_ppo.yaml").algo)
    assert type(algorithm).__name__ == "QuantilePPO"
    assert algorithm.config.quantile == 0.1  # type: ignore[attr-defined]


class Record(Callback):
    def __init__(self) -> None:
        self.told: list[object] = []

    def on_start(self, run: Path) -> None:
        self.told.append(run)

    def on_iteration(self, iteration: int, metrics: object) -> bool:
        self.told.append(iteration)
        return iteration == 1

    def on_checkpoint(self, folder: Path) -> None:
        self.told.append((folder / "policy").is_dir())

    def on_end(self, result: TrainResult) -> None:
        self.told.append(result.iterations)


@pytest.mark.slow
def test_own_parts_train_together_and_a_callback_stops_the_run(folder: Path) -> None:
    parts = {"policy": {"name": "small_policy:SmallPolicy", "chunk_size": 4}, "algo": "quantile_ppo:QuantilePPO"}
    record = Record()
    result = train("reach_square.yaml", parts | {"train.iterations": 9, "train.keep_best": False}, callbacks=[record])
    assert result.run.name.startswith("QuantilePPO-ReachSquare-")
    assert record.told == [result.run, 0, 1, True, 1]
    assert [m["iteration"] for m in result.metrics] == [0, 1]
    assert result.metrics[1]["episodes/trained"] == 8
    policy = load_policy(result.run)
    chunk = policy.act(np.zeros((1, 48, 48, 3), np.uint8), np.zeros(2), "move onto the blue square")
    assert chunk.shape == (4, 2)
    with pytest.raises(KeyError, match="move onto the red square"):
        policy.act(np.zeros((1, 48, 48, 3), np.uint8), np.zeros(2), "fly")
    with pytest.raises(ValueError, match=r"need uint8 \[1, 1, 48, 48, 3\]"):
        policy.act(np.zeros((1, 40, 48, 3), np.uint8), np.zeros(2))
    assert len(evaluate(result.run, 3).results) == 3


@pytest.mark.slow
def test_the_examples_of_the_api_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "an_example"}
    for block in blocks("api.md", "python"):
        exec(compile(block, "docs/api.md", "exec"), names)
    result = names["result"]
    assert isinstance(result, TrainResult)
    assert result.iterations == 2 or result.metrics[-1]["eval/greedy_success"] > 0.99
    assert result.checkpoint.is_dir()
    assert result.best_checkpoint is not None
