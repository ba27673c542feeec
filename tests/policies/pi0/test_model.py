"""π0: the library's network, the densities of its sampler, cloning, and its checkpoints."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import config as run_config
from tests.learner.learner_tools import make_learner, parameters, random_batch
from tests.policies.policy_helpers import check_elapsed_time
from tests.runtime_fakes import SPEC
from vla_rl.commands.cli import main
from vla_rl.config.loading import ConfigError, load_config
from vla_rl.core.errors import UserError
from vla_rl.core.records import SuperBatch
from vla_rl.policies.base import flow
from vla_rl.policies.base.policy import Decisions, PolicyInput
from vla_rl.policies.build import build_policy, check_policy, keys_of_checkpoint, policy_sizes, save_policy
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.model import Pi0

KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "last": {"random_steps": "last", "noise_level": 0.9},
    "all": {"random_steps": "all"},
    "cps": {"random_steps": "all", "noise": "cps", "noise_level": 1.0},
    "learned": {"random_steps": "all", "noise": "learned"},
    "padded": {"horizon": 6, "padded_dim": 9},
    "expert": {"train_expert_only": True},
}
ROWS = 4


@pytest.fixture(scope="module", params=KINDS)
def policy(request: pytest.FixtureRequest) -> Pi0:
    return make(**KINDS[request.param])


def make(seed: int = 0, **keys: Any) -> Pi0:
    built = build_policy(Pi0Config(chunk_size=4, **keys), SPEC, seed)
    assert isinstance(built, Pi0)
    return built


def observations(rows: int = ROWS, seed: int = 0) -> PolicyInput:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (rows, 1, 16, 16, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.randn(rows, 3, generator=generator)
    return PolicyInput(images, proprio, torch.arange(rows) % 2, torch.linspace(0, 1, rows))


def rows_of(seen: PolicyInput, index: slice) -> PolicyInput:
    return PolicyInput(*(getattr(seen, f.name)[index] for f in fields(seen)))


def draws_for(policy: Pi0, rows: int = ROWS, seed: int = 1) -> dict[str, torch.Tensor]:
    rng, spec = np.random.default_rng(seed), policy.config.spec(SPEC)
    drawn = [{name: numbers.draw(rng) for name, numbers in spec.draws.items()} for _ in range(rows)]
    return {name: torch.from_numpy(np.stack([np.asarray(d[name]) for d in drawn])) for name in spec.draws}


def choose(policy: Pi0, greedy: bool = False, temperature: float = 1.0) -> Decisions:
    return policy.act(observations(), draws_for(policy), torch.full((ROWS,), greedy), temperature)


def test_the_record_is_as_declared(policy: Pi0) -> None:
    chosen, spec = choose(policy), policy.config.spec(SPEC)
    assert chosen.record.keys() == spec.record.keys()
    for name, layout in spec.record.items():
        assert chosen.record[name].shape == (ROWS, *layout.shape)
        assert chosen.record[name].numpy().dtype == np.dtype(layout.dtype)
    assert chosen.logprobs.shape == (ROWS, 4, 7)


@pytest.mark.parametrize("greedy", [False, True])
def test_learning_finds_the_log_probabilities_of_sampling(policy: Pi0, greedy: bool) -> None:
    chosen = choose(policy, greedy, temperature=0.7)
    output = policy(observations(), chosen.record, 0.7)
    torch.testing.assert_close(output.logprobs, chosen.logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.values, chosen.values, atol=1e-5, rtol=0)
    alone = policy(rows_of(observations(), slice(1)), {k: v[:1] for k, v in chosen.record.items()}, 0.7)
    torch.testing.assert_close(alone.logprobs, chosen.logprobs[:1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("value_time", [True, False])
def test_elapsed_time_reaches_the_value_alone(value_time: bool) -> None:
    policy = make(value_time=value_time)
    check_elapsed_time(policy, observations(), draws_for(policy), is_read=value_time)


def test_a_greedy_chunk_is_the_librarys(policy: Pi0) -> None:
    seen, draws = observations(), draws_for(policy)
    chosen = policy.act(seen, draws, torch.ones(ROWS, dtype=torch.bool), 1.0)
    pixels = policy._pixels(seen.images)
    expected = policy.model.sample_actions(
        state=policy.read(seen).state,
        input_ids=policy.text_ids[seen.task],
        pixel_values=pixels,
        noise=draws["start"],
        attention_mask=policy.text_kept[seen.task],
        pixel_attention_mask=torch.ones(pixels.shape[:2], dtype=torch.bool),
        num_steps=policy.config.steps,
    )
    torch.testing.assert_close(chosen.record["actions"], expected[:, :4, :7], atol=1e-5, rtol=0)


def test_noise_follows_the_temperature() -> None:
    policy = make(random_steps="all")
    greedy = choose(policy, greedy=True).record["actions"]
    distances = [(choose(policy, temperature=t).record["actions"] - greedy).abs().mean() for t in (1e-4, 0.5, 1.0)]
    assert distances[0] < distances[1] < distances[2]


def test_the_last_step_alone_is_random() -> None:
    policy = make(random_steps="last")
    chosen, greedy = choose(policy), choose(policy, greedy=True)
    assert (chosen.record["first"] == policy.steps - 1).all()
    torch.testing.assert_close(chosen.record["chain"][:, 0], greedy.record["chain"][:, 0], atol=0, rtol=0)
    assert (chosen.record["actions"] != greedy.record["actions"]).all()


@pytest.mark.parametrize(("random_steps", "first"), [("all", {0}), ("last", {2}), ("one", {0, 1, 2})])
def test_replaced_noise_ends_before_the_last_step(random_steps: str, first: set[int]) -> None:
    policy = make(random_steps=random_steps, noise="cps")
    found = policy.act(observations(32), draws_for(policy, 32), torch.zeros(32, dtype=torch.bool), 1.0).record
    assert set(found["first"].tolist()) == first
    assert found["chain"].shape[1] == (4 if random_steps == "all" else 2)
    demonstrated = policy.encode(np.zeros((32, 4, 7), np.float32), np.random.default_rng(0))["first"]
    assert set(demonstrated) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [({"noise_level": 1.2}, "noise_level=1.2 to 1"), ({"denoise_steps": 1}, "raise denoise_steps=1")],
)
def test_noise_that_cannot_be_replaced_is_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Pi0Config(noise="cps", **keys)


def test_a_constant_dimension_has_neither_noise_nor_density() -> None:
    policy = make(random_steps="all")
    rng = np.random.default_rng(0)
    moving = np.array([True, True, False, True, False, False, True])
    actions = np.where(moving, rng.normal(size=(20, 7)), 0.25).astype(np.float32)
    policy.set_statistics(actions, np.where([True, False, True], rng.normal(size=(20, 3)), 1.0))
    assert policy.varying_actions().tolist() == moving.tolist()
    chosen = choose(policy)
    played = policy.decode({name: x.numpy() for name, x in chosen.record.items()})
    assert (played[..., ~moving] == 0.25).all()
    assert (played[..., moving].std(axis=(0, 1)) > 0).all()
    assert (chosen.logprobs[..., ~moving] == 0).all()
    assert (chosen.logprobs[..., moving] != 0).all()
    output = policy(observations(), chosen.record, 1.0)
    torch.testing.assert_close(output.logprobs, chosen.logprobs, atol=1e-4, rtol=0)
    np.testing.assert_allclose(policy.normalize_actions(actions)[:, ~moving], 0.0, err_msg="cloning teaches the mean")


def test_cloning_an_encoded_chunk_is_flow_matching() -> None:
    """-log pi of a demonstration's record is the squared error of the velocity, up to factor and constant."""
    policy, rng = make(noise_level=0.8), np.random.default_rng(0)
    actions = rng.normal(size=(ROWS, 4, 7)).astype(np.float32)
    record = {name: torch.from_numpy(x) for name, x in policy.encode(actions, rng).items()}
    output = policy(observations(), record, 1.0)
    times, length = flow.step_times(policy.config.steps, record["first"].long(), 1)
    start, end = record["chain"].unbind(1)
    with torch.no_grad():
        velocity, _ = policy.velocity(policy.read(observations()), start, times[:, 0])
    mean, deviation = flow.sde_step(start, velocity, times[:, 0], length, 0.8)
    target, _ = flow.sde_step(start, (start - end) / length, times[:, 0], length, 0.8)
    torch.testing.assert_close(output.logprobs, flow.gaussian_logprob(end, mean, deviation), atol=1e-4, rtol=1e-4)
    assert (target - end).abs().max() < 1.0, "the demonstrated step is near the mean under its own velocity"
    np.testing.assert_allclose(policy.normalized_actions(policy.encode(actions, rng)), actions, atol=1e-6)


def test_the_flow_matching_loss_falls() -> None:
    policy, rng = make(), np.random.default_rng(0)
    actions = np.full((16, 4, 7), 0.5, np.float32)
    seen, mask = observations(16), torch.ones(16, 4, dtype=torch.bool)
    optimizer = torch.optim.AdamW(policy.trunk_parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = policy.imitation_loss(seen, actions, mask, rng, 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


def test_every_trained_weight_gets_a_gradient(policy: Pi0) -> None:
    policy.zero_grad()
    output = policy(observations(), choose(policy).record, 1.0)
    (output.logprobs.sum() + output.values.sum()).backward()
    missing = [name for name, p in policy.trained_parameters().items() if p.grad is None]
    assert missing == []
    trained = [*policy.trunk_parameters(), *policy.value_parameters()]
    assert {id(p) for p in trained} == {id(p) for p in policy.trained_parameters().values()}


def test_sizes_are_those_of_the_network(policy: Pi0) -> None:
    sizes = policy_sizes(policy.config, SPEC, element_size=4)
    assert sizes.parameters == sum(weight.numel() for weight in policy.parameters())
    assert sizes.trained == sum(weight.numel() for weight in policy.trained_parameters().values())
    weights, saved = {weight.data_ptr() for weight in policy.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    record = choose(policy).record
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = policy(observations(), record, 1.0)
    assert held.values.requires_grad
    assert 1.0 <= ROWS * sizes.saved_each / sum(saved.values()) <= 1.6, "an upper bound, not far off"


def test_without_the_vision_language_model_little_is_trained() -> None:
    config = Pi0Config(size="base", horizon=50, padded_dim=32)
    alone = policy_sizes(config.model_copy(update={"train_expert_only": True}), SPEC, element_size=2)
    everything = policy_sizes(config, SPEC, element_size=2)
    assert alone.parameters == everything.parameters
    assert alone.trained == pytest.approx(314e6, rel=0.02)  # the publication: an expert of 300 million
    assert alone.train_each < everything.train_each / 8
    assert (config.memory_remedy, config.model_copy(update={"train_expert_only": True}).memory_remedy) == (
        "train the action expert alone with policy.train_expert_only=true",
        "",
    )


def test_only_the_expert_learns() -> None:
    policy = make(train_expert_only=True)
    trained = set(policy.trained_parameters())
    assert {name.split(".")[0] for name in trained} == {"model", "value_head"}
    assert not [name for name in trained if name.startswith("model.model.vlm.")]
    assert {name for name in trained if name.startswith("model.model.dit.")}
    policy(observations(), choose(policy).record, 1.0, detach_value=False).values.sum().backward()
    assert all(weight.grad is None for weight in policy.model.model.vlm.parameters())


def test_the_published_size_needs_no_building() -> None:
    sizes = policy_sizes(Pi0Config(size="base", horizon=50, padded_dim=32), SPEC, element_size=2)
    unused_head = 257_152 * 1024  # of the action expert, which lerobot's file has
    # The model hub lists 4.95 + 5.00 + 4.05 GB of float32 for lerobot's pi0. The value head, which it lacks, is small.
    assert 4 * (sizes.parameters + unused_head) == pytest.approx(14.00e9, abs=0.015e9)


def test_a_checkpoint_restores_policy_and_statistics(tmp_path: Path) -> None:
    policy = make()
    save_policy(policy.config, policy, tmp_path / "policy", {"by": "a test"})
    settings = policy.config.model_copy(update={"checkpoint": str(tmp_path / "policy")})
    check_policy(settings, SPEC)
    assert keys_of_checkpoint(settings, SPEC) == {
        "env.wrist_camera": len(SPEC.views) > 1,
        "env.proprio": SPEC.proprio_dim > 0,
    }
    loaded = build_policy(settings, SPEC, seed=9)
    assert isinstance(loaded, Pi0)
    ours, theirs = policy.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.action_statistics == policy.action_statistics
    with pytest.raises(UserError, match=r"proprio_dim=3, the run has 4 .*4 actions at once .lower policy.chunk_size=5"):
        check_policy(settings.model_copy(update={"chunk_size": 5}), replace(SPEC, proprio_dim=4))
    (tmp_path / "policy" / "statistics.json").write_text("{}")
    with pytest.raises(UserError, match=r"statistics.json: 'action' is missing"):
        check_policy(settings, SPEC)


@pytest.mark.parametrize("kind", ["padded", "learned"])
def test_a_checkpoint_is_exported_in_the_formats_that_it_has(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = make(**KINDS[kind])
    save_policy(policy.config, policy, tmp_path / "policy", {"by": "a test"})
    arguments = ["export", str(tmp_path / "policy"), "--output", str(tmp_path / "out"), "--format"]
    assert main([*arguments, "openvla-oft"]) == 2
    assert f"--format openvla-oft: {tmp_path / 'policy'} can be written as native" in capsys.readouterr().err
    assert main([*arguments, "native", "--views", "2"]) == 2
    assert "--views: no use for it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*arguments, "native"]) == 0
    config = policy.config.model_copy(update={"checkpoint": str(tmp_path / "out")})
    ours, theirs = policy.state_dict(), build_policy(config, SPEC, seed=9).state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert "exported_from" in (tmp_path / "out/metadata.json").read_text()


def test_a_checkpoint_of_another_policy_is_named(tmp_path: Path) -> None:
    other = OpenVLAOFTConfig(chunk_size=4)
    save_policy(other, build_policy(other, SPEC, 0), tmp_path / "oft", {})
    with pytest.raises(UserError, match=r"policy\.name=pi0 reads"):
        check_policy(Pi0Config(checkpoint=str(tmp_path / "oft"), chunk_size=4), SPEC)


def test_config_mistakes_are_named() -> None:
    given = ["policy=pi0", "policy.horizon=4", "policy.chunk_size=8", "sft.bin_smoothing=1"]
    with pytest.raises(ConfigError, match="horizon=4 is shorter than chunk_size=8"):
        load_config(None, given)
    with pytest.raises(ConfigError, match=r"smooths bins, which policy\.name=pi0 does not have"):
        load_config(None, ["policy=pi0", "sft.bin_smoothing=1"])


def recorded_batch(policy: Pi0) -> SuperBatch:
    """A random super-batch whose decisions this policy has taken."""
    batch = random_batch()
    seen = batch.images[batch.obs_row], batch.proprio[batch.obs_row], batch.task, batch.elapsed[batch.obs_row]
    draws = draws_for(policy, batch.num_chunks)
    greedy = torch.zeros(batch.num_chunks, dtype=torch.bool)
    chosen = policy.act(PolicyInput(*map(torch.from_numpy, seen)), draws, greedy, 1.0)
    record = {name: x.numpy() for name, x in chosen.record.items()}
    return replace(batch, record=record, logprobs=chosen.logprobs.numpy(), values=chosen.values.numpy())


@pytest.mark.parametrize("algo", ["ppo", "grpo", "iql"])
def test_a_learner_trains_it(algo: str) -> None:
    keys = {"ppo": {"value_warmup": 0, "kl_coef": 0.1}, "grpo": {"kl_coef": 0.1}, "iql": {"critic_steps": 2}}
    cfg = run_config(
        policy={"name": "pi0", "chunk_size": 4},
        algo={"name": algo} | keys[algo],
        learner={"micro_batch": 64, "lr": 1e-3},
    )
    learner = make_learner(cfg)
    assert isinstance(learner.policy, Pi0)
    before = parameters(learner)
    metrics = learner.update(replace(recorded_batch(learner.policy), group=np.array([0, 0, 0, 1, 1])))
    after = parameters(learner)
    if algo != "iql":
        assert metrics["learner/ratio_mean"] == pytest.approx(1.0, abs=0.2)
        assert metrics["learner/policy_loss"] != 0, "there are advantages"
        assert any(not np.array_equal(before[name], after[name]) for name in before)
    else:
        assert metrics["learner/critic_loss"] > 0
