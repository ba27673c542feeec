"""A frozen flow policy whose noise a small network chooses: what it does, what is trained, and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.policies.pi0.test_model import ROWS, draws_for, make, observations
from tests.runtime_fakes import SPEC, A, K
from vla_rl.config.loading import ConfigError, load_config
from vla_rl.core.errors import UserError
from vla_rl.policies.base.checkpoint_folder import CheckpointError
from vla_rl.policies.base.flow_config import STEERING_FILE
from vla_rl.policies.base.steering import without_steering
from vla_rl.policies.build import build_policy, policy_sizes, save_policy
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.model import Pi0

STEER = {"width": 16, "bound": 2.0, "initial_std": 0.4}
LENGTHS = {"horizon": 6, "padded_dim": 9}


@pytest.fixture
def steered() -> Pi0:
    """Its means are not at 0."""
    policy = make(steer=STEER, **LENGTHS)
    moved(policy)
    return policy


def moved(policy: Pi0) -> None:
    assert policy.steering is not None
    with torch.no_grad():
        for weight in (policy.steering.mean.weight, policy.model.action_out_proj.weight):  # which begin as 0
            weight.normal_(generator=torch.Generator().manual_seed(0))


def test_its_chunk_follows_from_the_noise_as_that_of_the_policy_itself(steered: Pi0) -> None:
    greedy = torch.tensor([False, True] * (ROWS // 2))
    chosen = steered.act(observations(), draws_for(steered), greedy, 0.5)
    spec, noise = steered.config.spec(SPEC), chosen.record["noise"]
    assert chosen.record.keys() == spec.record.keys()
    assert all(chosen.record[name].shape == (ROWS, *layout.shape) for name, layout in spec.record.items())
    plain = make(**LENGTHS)
    plain.load_state_dict(without_steering(steered.state_dict()))
    draws = draws_for(plain) | {"start": noise.expand(-1, 6, -1)}
    same = plain.act(observations(), draws, torch.ones(ROWS, dtype=torch.bool), 1.0)
    torch.testing.assert_close(chosen.record["actions"], same.record["actions"], atol=1e-5, rtol=0)
    assert (chosen.record["actions"] - noise[:, :, :A]).abs().max() > 0.1, "it was denoised"
    output = steered(observations(), chosen.record, 0.5)
    assert output.means.shape == output.deviations.shape == output.entropy.shape == (ROWS, 1, 9)
    assert output.means.abs().max() > 0.5
    assert output.means.abs().max() <= 2.0
    torch.testing.assert_close(noise[1::2], output.means[1::2], atol=1e-5, rtol=0)
    drawn = output.means + 0.2 * draws_for(steered)["noise"]
    torch.testing.assert_close(noise[::2], drawn[::2], atol=1e-5, rtol=0)
    torch.testing.assert_close(output.logprobs, chosen.logprobs, atol=1e-4, rtol=0)
    density = torch.distributions.Normal(output.means, 0.2).log_prob(noise).sum(dim=(1, 2))
    torch.testing.assert_close(output.logprobs.sum(dim=(1, 2)), density, atol=1e-3, rtol=0)
    assert np.array_equal(steered.normalized_actions({"noise": noise.numpy()}), noise.numpy())
    assert steered.action_limits(np.ones((2, 2, A), np.float32)) is None, "noise has none"
    assert np.array_equal(plain.action_limits(np.ones((2, 2, A), np.float32)), np.ones((2, 2, A)))


def test_only_the_small_network_and_the_value_head_are_trained(steered: Pi0) -> None:
    trained = steered.trained_parameters()
    assert {name.split(".")[0] for name in trained} == {"steering", "value_head"}
    sizes = policy_sizes(steered.config, SPEC, 4)
    assert sizes.trained == sum(p.numel() for p in trained.values())
    assert sizes.parameters == sum(p.numel() for p in steered.parameters())
    record = steered.act(observations(), draws_for(steered), torch.zeros(ROWS, dtype=torch.bool), 1.0).record
    seen = observations()
    read = steered.embedded(seen)
    once = type(seen)(read, torch.zeros(ROWS, 0), seen.task, seen.elapsed)
    ends = [steered(x, record, 1.0) for x in (seen, once)]
    for name in ("means", "logprobs", "values", "features"):
        torch.testing.assert_close(getattr(ends[0], name), getattr(ends[1], name), atol=1e-5, rtol=0)
    (ends[0].means.sum() + ends[0].deviations.sum() + ends[0].values.sum()).backward()
    assert all(p.grad is not None for name, p in trained.items() if name.startswith("steering.mean"))
    assert make().embedded(seen) is None


def test_its_checkpoint_is_the_policys_and_one_file_more(tmp_path: Path) -> None:
    plain = make(**LENGTHS)
    save_policy(plain.config, plain, tmp_path / "plain", {})
    begun = Pi0Config(chunk_size=K, checkpoint=str(tmp_path / "plain"), steer=STEER)
    steered = build_policy(begun, SPEC, 0)
    assert isinstance(steered, Pi0)
    assert steered.steering is not None
    torch.nn.init.normal_(steered.steering.mean.weight)
    save_policy(begun, steered, tmp_path / "steered", {})
    more = {path.name for path in (tmp_path / "steered").iterdir()} - {x.name for x in (tmp_path / "plain").iterdir()}
    assert more == {STEERING_FILE}
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "steered" / path.name).read_bytes()
    folder = str(tmp_path / "steered")
    wanted = steered.act(observations(), draws_for(steered), torch.zeros(ROWS, dtype=torch.bool), 1.0)
    for keys in ({}, {"steer": STEER}):
        again = build_policy(Pi0Config(chunk_size=K, checkpoint=folder, **keys), SPEC, 1)
        found = again.act(observations(), draws_for(steered), torch.zeros(ROWS, dtype=torch.bool), 1.0)
        assert torch.equal(found.record["actions"], wanted.record["actions"])
        assert {name.split(".")[0] for name in again.trained_parameters()} == {"steering", "value_head"}
    with pytest.raises(CheckpointError, match=r"steering\.safetensors does not fit its policy\.steer"):
        build_policy(Pi0Config(chunk_size=K, checkpoint=folder, steer={"width": 8}), SPEC, 0)
    for damaged in (b"", b"\xff" * 64, (tmp_path / "steered/metadata.json").read_bytes()):
        (tmp_path / "steered" / STEERING_FILE).write_bytes(damaged)
        with pytest.raises(UserError, match=r"steering\.safetensors is damaged"):
            build_policy(Pi0Config(chunk_size=K, checkpoint=folder), SPEC, 0)


def test_it_clones_nothing(steered: Pi0) -> None:
    actions, rng = np.zeros((ROWS, K, A), np.float32), np.random.default_rng(0)
    with pytest.raises(UserError, match="cannot clone actions"):
        steered.encode(actions, rng)
    with pytest.raises(UserError, match="cannot clone actions"):
        steered.imitation_loss(observations(), actions, torch.ones(ROWS, K, dtype=torch.bool), rng, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["policy.steer={}"], r"policy\.steer=.*algo\.name=ppo does not train it; use algo=dsrl"),
        (["algo=dsrl"], r"policy\.name=pi0.*no network chooses its noise.*policy\.steer="),
        (["policy.steer={}", "algo=dsrl", "algo.demos=[x.hdf5]"], r"algo\.demos.*demonstrations lack it"),
    ],
)
def test_what_cannot_be_steered_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["policy=pi0", "env=tabletop", *changes])
