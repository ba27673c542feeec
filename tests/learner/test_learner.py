import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.learner_tools import SPEC, config, make_learner, parameters, random_batch, run_ranks
from tests.runtime_fakes import trajectory
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, create_pool
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers
from vla_rl.core.records import Observation
from vla_rl.inference.inference_server import BatchRule, InferenceServer
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.learner.deepspeed_engine import uses_fused_adamw
from vla_rl.replay.schedule import training_episode
from vla_rl.replay.super_batch import collate


def _largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def _apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> float:
    """Distance of two ends as a share of the way from their start. (Where a weight's gradient is all rounding, Adam
    makes a whole step of it, so single weights may differ by that.)"""
    assert a.keys() == b.keys() == start.keys()
    apart, way = (math.sqrt(sum(float(np.square(a[name] - c[name]).sum()) for name in a)) for c in (b, start))
    return apart / way


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_sampled_and_recomputed_logprobs_agree(tmp_path, decoding):
    """Law 6, through the real server: shared memory, published weights, dynamic batches of other sizes."""
    cfg = config(policy={"chunk_size": 4, "temperature": 1.7, "decoding": decoding})
    learner = make_learner(cfg)
    learner.update(random_batch())  # weights that no process but the learner has seen
    create_weight_buffers(tmp_path / "weights", learner.published_nbytes())
    learner.publish(1, WeightPublisher(tmp_path / "weights"))

    from vla_rl.policies.build import build_policy

    address = PoolAddress(str(tmp_path), "server0", 1, 12)
    create_pool(address, SPEC, cfg.policy.spec(SPEC))
    server_policy = build_policy(cfg.policy, SPEC, seed=99)
    actor = PolicyRunner(server_policy, cfg, WeightReader(tmp_path / "weights"), "cpu")
    server = InferenceServer(actor, ServerMailbox(address), BatchRule(5, 0.01))
    thread = threading.Thread(target=server.run)
    thread.start()
    mailbox, rng = WorkerMailbox(address, 0), np.random.default_rng(0)
    mailbox.observation.images[:] = rng.integers(0, 256, mailbox.observation.images.shape)
    mailbox.observation.proprio[:] = rng.normal(size=mailbox.observation.proprio.shape)
    mailbox.observation.task[:] = np.arange(12) % 2
    mailbox.observation.elapsed[:] = rng.random(12)
    mailbox.request(range(12), {"uniforms": rng.random((12, 4, 7)).astype(np.float32)}, np.arange(12) % 3 == 0)
    answered: set[int] = set()
    while len(answered) < 12:
        answered.update(mailbox.wait(30.0))
    answer, versions = mailbox.answer(range(12))
    server.stop()
    thread.join()
    assert versions.tolist() == [1] * 12
    assert server.meter.counts["batches"] >= 3

    base = trajectory(training_episode(0, 0, 0), 12)
    batch = collate([base], 1, SPEC.max_episode_steps)
    batch = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__}
        | {
            "images": mailbox.observation.images.copy(),
            "proprio": mailbox.observation.proprio.copy(),
            "task": mailbox.observation.task.copy(),
            "elapsed": mailbox.observation.elapsed.copy(),
            "record": answer.record,
            "logprobs": answer.logprobs,
        }
    )
    found = learner._passes.evaluate(learner._engine, batch)
    assert np.abs(found.logprobs - answer.logprobs).max() <= 1e-4
    assert np.abs(found.values - answer.values).max() <= 1e-4
    assert np.abs(found.logprobs).max() > 1, "the comparison is about something"


def test_a_condition_is_the_same_prompt_in_sampling_and_in_learning():
    """RECAP acts under "positive"; the learner rates a chunk under any condition."""
    from vla_rl.policies.build import build_policy

    cfg = config(algo={"name": "recap"})
    learner, batch = make_learner(cfg), random_batch()
    policy = build_policy(cfg.policy, SPEC, cfg.seed, cfg.algo.prompts(SPEC.instructions))
    runner, rows = PolicyRunner(policy, cfg, None, "cpu"), np.arange(batch.num_chunks)
    at = batch.obs_row
    seen = Observation(batch.images[at], batch.proprio[at], batch.task, batch.elapsed[at])
    draws = {"uniforms": np.random.default_rng(0).random((len(rows), 4, 7)).astype(np.float32)}
    chosen = runner.act(seen, draws, np.zeros(len(rows), bool))
    batch = replace(batch, record=chosen.record)
    with torch.no_grad():
        rated = [learner._passes.of_chunks(learner._engine, batch, rows, np.full(len(rows), c)) for c in range(3)]
    apart = [np.abs(output.logprobs.numpy() - chosen.logprobs).max() for output in rated]
    assert apart[1] <= 1e-4
    assert min(apart[0], apart[2]) > 0.01, "the other prompts say something else"


def test_success_filtered_cloning_takes_no_step_without_a_success():
    learner, batch = make_learner(config(algo={"name": "rft"})), random_batch()
    before = parameters(learner)
    successes = batch.success.copy()
    batch.success[:] = False
    assert learner.update(batch)["learner/optimizer_steps"] == 0
    assert _largest_difference(parameters(learner), before) == 0.0
    batch.success[:] = successes
    assert learner.update(batch)["learner/optimizer_steps"] == 2
    assert _largest_difference(parameters(learner), before) > 0.0


def test_micro_batch_size_does_not_change_the_update():
    results = []
    for micro_batch in (64, 3):
        learner = make_learner(config(learner={"micro_batch": micro_batch, "lr": 1e-3}))
        before = parameters(learner)
        metrics = learner.update(random_batch())
        results.append((parameters(learner), metrics))
        assert _largest_difference(before, results[-1][0]) > 1e-4
    (a, metrics_a), (b, metrics_b) = results
    assert _apart(a, b, before) < 1e-3
    for name in ("learner/policy_loss", "learner/value_loss", "learner/entropy", "learner/approx_kl"):
        assert metrics_a[name] == pytest.approx(metrics_b[name], rel=1e-4, abs=1e-6)


def test_value_warmup_trains_the_value_head_only():
    learner = make_learner(config(algo={"name": "ppo", "value_warmup": 1}))
    before = parameters(learner)
    learner.update(random_batch())
    after = parameters(learner)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("value_head.") for name in changed)
    learner.update(random_batch(policy_version=1))
    assert _largest_difference(after, parameters(learner)) > 1e-4


@pytest.mark.parametrize(
    "settings",
    [{}, {"zero_stage": 2}, {"zero_stage": 3}, {"precision": "bf16"}, {"precision": "bf16", "zero_stage": 1}],
)
def test_where_the_value_head_learns_alone_no_gradient_goes_through_the_trunk(settings):
    """And it learns what it would learn beside a policy whose learning rate is 0."""
    alone = make_learner(config(algo={"name": "ppo", "value_warmup": 2, "minibatches": 2}, learner=settings))
    beside = make_learner(config(learner=settings))
    beside._optimizer.param_groups[0]["peak_lr"] = 0.0
    reached: list[str] = []
    for name, parameter in alone.policy.trained_parameters().items():
        if not name.startswith("value_head."):
            parameter.register_hook(lambda gradient, name=name: reached.append(name))
    for version in range(2):
        metrics = [learner.update(random_batch(version, policy_version=version)) for learner in (alone, beside)]
        for name in ("value_loss", "value_grad_norm", "entropy", "approx_kl"):
            assert metrics[0][f"learner/{name}"] == pytest.approx(metrics[1][f"learner/{name}"], rel=1e-5), name
        assert metrics[0]["learner/policy_grad_norm"] == 0.0
    assert reached == []
    apart = _largest_difference(parameters(alone), parameters(beside))
    assert apart <= (1e-6 if settings.get("precision") != "bf16" else 1e-3)
    alone.update(random_batch(2, policy_version=2))
    assert reached, "the hooks are called when the policy learns"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_after_value_warmup_the_policy_starts_as_if_there_had_been_none(stage):
    """Adam's bias correction would take updates without gradients for a long history of zeros."""
    settings = {"learner": {"weight_decay": 0.1, "max_grad_norm": 1e9, "zero_stage": stage}, "policy": {"size": "nano"}}
    policy = {"size": "nano", "chunk_size": 4, "detach_value": False}
    warm = make_learner(config(algo={"name": "ppo", "value_warmup": 2}, **settings | {"policy": policy}))
    cold = make_learner(config(**settings | {"policy": policy | {"detach_value": True}}))
    before = parameters(warm)
    for version in (0, 1):
        warm.update(random_batch(policy_version=version))
    changed = {name for name, value in parameters(warm).items() if not np.array_equal(before[name], value)}
    assert changed
    assert all(name.startswith("value_head.") for name in changed), "detach_value=false trains the trunk only later"
    warm.config = warm._passes._config = cold.config  # the value loss of the next update shall not move the trunk
    for learner in (warm, cold):
        learner.update(random_batch(policy_version=2))
    warmed, cooled = parameters(warm), parameters(cold)
    trunk = [name for name in warmed if not name.startswith("value_head.")]
    assert max(np.abs(warmed[name] - cooled[name]).max() for name in trunk) < 1e-6
    assert max(np.abs(warmed[name] - before[name]).max() for name in trunk) > 1e-4


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16"}, {"precision": "bf16", "zero_stage": 1}, {"zero_stage": 3}]
)
def test_adam_counts_its_steps_from_the_first(settings):
    learner = make_learner(config(algo={"name": "ppo", "minibatches": 2, "epochs": 1}, learner=settings))
    assert learner.update(random_batch())["learner/optimizer_steps"] == 2
    optimizer = getattr(learner._optimizer, "optimizer", learner._optimizer)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_an_update_ends_when_it_has_moved_far_enough():
    """Whatever the policy that acted was: data that are far from it end no update."""
    for target, steps in ((None, 6), (1.0, 6), (1e-9, 1)):
        algo = {"name": "ppo", "minibatches": 2, "epochs": 3, "target_kl": target}
        learner, batch = make_learner(config(algo=algo, learner={"lr": 2e-6})), random_batch()
        batch.logprobs[:] = -5.0
        metrics = learner.update(batch)
        assert metrics["learner/optimizer_steps"] == steps
        assert metrics["learner/approx_kl"] > 1.0 > metrics["learner/update_kl"] > 1e-9


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 3}, {"zero_stage": 3}])
def test_the_kl_of_an_update_is_that_between_its_weights(settings):
    algo = {"name": "ppo", "minibatches": 1, "epochs": 2}
    learner, batch = make_learner(config(algo=algo, learner={"lr": 2e-6} | settings)), random_batch()
    assert batch.num_chunks <= 32
    before = learner._passes.evaluate(learner._engine, batch).logprobs
    found = learner.update(batch)["learner/update_kl"]
    after = learner._passes.evaluate(learner._engine, batch).logprobs
    log_r = (after.astype(float) - before).sum(axis=2)[batch.step_mask]
    whole = float(np.mean(np.expm1(log_r) - log_r))
    assert 1e-6 < whole < 1
    assert found == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"zero_stage": 1}, {"zero_stage": 3}])
@pytest.mark.parametrize("algo", [{"name": "ppo"}, {"name": "awr"}, {"name": "iql", "critic_steps": 2}])
def test_without_a_signal_the_policy_stays_where_it_is(algo, settings):
    """Where all episodes fail, what is left of the advantages are errors of the value function."""
    learner = make_learner(config(algo=algo, learner={"lr": 1e-3, "weight_decay": 0.1} | settings))
    for version in range(2):
        learner.update(random_batch(policy_version=version))
    before, batch = parameters(learner), random_batch(policy_version=2)
    batch.rewards[:] = 0.0
    metrics = learner.update(batch)
    changed = {name for name, value in parameters(learner).items() if not np.array_equal(before[name], value)}
    assert all(name.startswith("value_head.") for name in changed)
    assert metrics["learner/update_kl"] == 0.0
    assert "learner/explained_variance" not in metrics
    if algo["name"] == "ppo":
        assert changed
        assert metrics["learner/advantage_std"] > 0
    learner.update(random_batch(policy_version=3))
    assert _largest_difference(before, parameters(learner)) > 1e-4


def test_temperature_follows_its_schedule():
    policy = {"chunk_size": 4, "temperature": 2.0, "temperature_end": 1.0, "temperature_iterations": 2}
    annealed, constant = make_learner(config(policy=policy)), make_learner(config(policy={"chunk_size": 4}))
    figures = [learner.update(random_batch(policy_version=2))["learner/entropy"] for learner in (annealed, constant)]
    assert figures[0] == figures[1]
    assert annealed.config.policy.temperature_at(1) == 1.5


def test_learning_rates_fall_to_the_end():
    for schedule, factors in (
        ("linear", [0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 0.8535534, 0.5, 0.1464466]),
    ):
        settings = config(learner={"warmup_iterations": 1, "lr_schedule": schedule}).learner
        assert [settings.policy_lr_factor(i, 0, 5) for i in range(5)] == pytest.approx(factors)


def test_the_policys_warm_up_begins_at_its_first_update():
    settings = config(learner={"warmup_iterations": 1, "lr_schedule": "linear"}).learner
    assert [settings.policy_lr_factor(i, 2, 7) for i in range(7)] == pytest.approx([0, 0, 0.5, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("schedule", "factors"), [("constant", (1.0, 1.0)), ("linear", (0.25, 0.2)), ("cosine", (0.1464466, 0.0954915))]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_update_is_made_at_the_scheduled_rates(schedule, factors, stage):
    """Both of the groups and of the weights: Adam's first step moves one with a clear gradient by the whole rate."""
    learner = make_learner(
        config(
            learner={
                "lr": 1e-3,
                "value_lr": 1e-2,
                "warmup_iterations": 1,
                "lr_schedule": schedule,
                "zero_stage": stage,
            },
            algo={"name": "ppo", "minibatches": 1},
            policy={"name": "openvla_oft", "chunk_size": 4, "size": "nano"},
            train={"iterations": 5},
        )
    )
    before = parameters(learner)
    metrics = learner.update(random_batch(policy_version=4))
    rates = 1e-3 * factors[0], 1e-2 * factors[1]
    assert [group["lr"] for group in learner._optimizer.param_groups] == pytest.approx(rates)
    assert metrics["learner/lr"] == pytest.approx(rates[0])
    moved = {name: np.abs(value - before[name]).max() for name, value in parameters(learner).items()}
    for of_value, rate in enumerate(rates):
        assert max(moved[n] for n in moved if n.startswith("value_head.") == of_value) == pytest.approx(rate, rel=1e-2)


def test_zero_learning_rate_changes_nothing():
    learner = make_learner(config(learner={"lr": 0.0}))
    before = parameters(learner)
    learner.update(random_batch())
    assert _largest_difference(before, parameters(learner)) == 0.0


def test_learning_rate_warmup_and_groups():
    learner = make_learner(config(learner={"lr": 1e-3, "value_lr": 1e-2, "warmup_iterations": 3}))
    rates = []
    for iteration in range(5):
        learner.update(random_batch(policy_version=iteration))
        rates.append([group["lr"] for group in learner._optimizer.param_groups])
    assert np.allclose([r[0] for r in rates], [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    assert {r[1] for r in rates} == {1e-2}, "a value head needs no warm-up"


def test_a_saved_learner_goes_on_as_if_nothing_had_happened(tmp_path):
    straight = make_learner(config())
    straight.update(random_batch(0))
    straight.save(tmp_path)
    resumed = make_learner(config())
    resumed.load(tmp_path)
    for learner in (straight, resumed):
        learner.update(random_batch(1, policy_version=1))
    assert _largest_difference(parameters(straight), parameters(resumed)) == 0.0
    with pytest.raises(FileNotFoundError, match="no learner state"):
        resumed.load(tmp_path / "nowhere")


def _goes_on_from(rank: int, world_size: int, port: int, folder: Path, settings: dict) -> dict:
    learner = make_learner(config(learner={"ranks": world_size} | settings), rank, world_size, port)
    learner.load(folder)
    learner.update(random_batch(1, policy_version=1))
    learner.save(folder.with_name("again"))
    return parameters(learner)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"zero_stage": 3}, {"zero_stage": 1, "precision": "bf16"}], ids=["zero 3", "zero 1, bf16"]
)
def test_another_number_of_ranks_goes_on_under_another_zero_stage(tmp_path, settings):
    """As when a run moves to another plan: from one rank to two that divide the state, and back to one."""
    precision = {"precision": settings.get("precision", "fp32")}
    straight = make_learner(config(learner=precision))
    straight.update(random_batch(0))
    straight.save(tmp_path / "state")
    before = parameters(straight)
    straight.update(random_batch(1, policy_version=1))
    ranks = run_ranks(_goes_on_from, 2, tmp_path / "state", settings)
    assert _largest_difference(*ranks) == 0.0
    assert _apart(parameters(straight), ranks[0], before) < (1e-3 if precision["precision"] == "fp32" else 0.05)
    alone = make_learner(config(learner=precision))
    alone.load(tmp_path / "again")
    assert _largest_difference(parameters(alone), ranks[0]) == 0.0
    after = [parameters(straight), parameters(alone)]
    for learner in (straight, alone):  # the moments are there, too
        learner.update(random_batch(2, policy_version=2))
    assert _apart(parameters(straight), parameters(alone), after[0]) < (0.01 if "precision" not in settings else 0.1)


def test_recompute_makes_the_first_ratio_one():
    """With recomputed proximal log-probabilities the clip is centred on the weights at the update's start."""
    learner = make_learner(config(algo={"name": "ppo", "minibatches": 1, "proximal": "recomputed"}))
    metrics = learner.update(random_batch())
    assert metrics["learner/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["learner/clip_fraction"] == 0.0


def test_values_alone_are_recomputed_under_the_weights_before_the_update():
    learner, batch = make_learner(config(algo={"name": "ppo", "values": "recomputed"})), random_batch()
    values = learner._passes.evaluate(learner._engine, batch).values
    assert np.abs(values - batch.values).max() > 0.1
    batch, targets, _ = learner._targets(batch)
    assert np.array_equal(targets.old_values, values)
    assert targets.proximal_logprobs is batch.logprobs
    cut = batch.final_obs_row >= 0
    assert np.abs(batch.bootstrap_value - random_batch().bootstrap_value)[cut].max() > 0, "of final observations, too"


def test_the_reference_is_the_policy_that_the_run_began_with(tmp_path):
    settings = config(algo={"name": "ppo", "minibatches": 1, "kl_coef": 50.0}, learner={"lr": 1e-3})
    straight = make_learner(settings)
    first = straight.update(random_batch(0))
    assert first["learner/reference_kl"] == pytest.approx(0.0, abs=1e-9)
    straight.save(tmp_path)
    resumed = make_learner(settings)
    resumed.load(tmp_path)
    second = resumed.update(random_batch(1, policy_version=1))
    assert second["learner/reference_kl"] > 1e-6
    assert straight.update(random_batch(1, policy_version=1)) == second
    free = make_learner(config(algo={"name": "ppo", "minibatches": 1, "kl_coef": 1e-9}, learner={"lr": 1e-3}))
    free.update(random_batch(0))
    for iteration in range(1, 6):
        held, far = (x.update(random_batch(iteration, policy_version=iteration)) for x in (straight, free))
    assert held["learner/reference_kl"] < 0.8 * far["learner/reference_kl"]


def _update_on_rank(rank: int, world_size: int, port: int, zero_stage: int, precision: str) -> dict:
    settings = {"ranks": world_size, "zero_stage": zero_stage, "precision": precision, "micro_batch": 3, "lr": 1e-3}
    learner = make_learner(config(learner=settings), rank, world_size, port)
    metrics = [learner.update(random_batch(seed, policy_version=seed)) for seed in range(2)]
    with learner.whole_policy() as policy:
        saved = {name: tensor.float().numpy().copy() for name, tensor in policy.state_dict().items()}
        held = sum(parameter.numel() for parameter in policy.parameters())
    return {"parameters": parameters(learner), "metrics": metrics, "saved": saved, "held": held}


@pytest.fixture(scope="module")
def of_one_rank():
    """Parameters before and after two updates, and the metrics of both."""
    learner = make_learner(config(learner={"micro_batch": 64, "lr": 1e-3}))
    before = parameters(learner)
    metrics = [learner.update(random_batch(seed, policy_version=seed)) for seed in range(2)]
    return before, parameters(learner), metrics


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")])
def test_ranks_and_zero_stages_do_not_change_the_update(of_one_rank, zero_stage, precision):
    """Law 7: two ranks at any ZeRO stage do what one rank does."""
    ranks = run_ranks(_update_on_rank, 2, zero_stage, precision)
    assert _largest_difference(ranks[0]["parameters"], ranks[1]["parameters"]) == 0.0
    assert _largest_difference(ranks[0]["parameters"], ranks[0]["saved"]) == 0.0
    assert (ranks[1]["held"] < ranks[0]["held"]) == (zero_stage == 3), "only rank 0, which writes, has it whole"
    before, after, metrics = of_one_rank
    limit = 1e-3 if precision == "fp32" else 0.3
    assert _apart(after, ranks[0]["parameters"], before) < limit
    for ours, theirs in zip(metrics, ranks[0]["metrics"], strict=True):
        for name in ("learner/policy_loss", "learner/value_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3 if precision == "fp32" else 0.3, abs=1e-4)


def test_under_zero_3_a_publication_gathers_one_parameter_at_a_time(tmp_path, monkeypatch):
    import deepspeed

    learner = make_learner(config(learner={"zero_stage": 3}))
    original, gathered, open_now = deepspeed.zero.GatheredParameters, [], []

    class Gathered(original):
        def __enter__(self) -> None:
            assert not open_now, "the one before is given back first"
            open_now.append(self)
            gathered.extend(id(p) for p in self.params)
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            open_now.remove(self)
            super().__exit__(*error)

    expected = parameters(learner)
    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", Gathered)
    trained = [id(p) for p in learner.policy.trained_parameters().values()]
    create_weight_buffers(tmp_path / "weights", learner.published_nbytes())
    assert gathered == [], "sizes are known without gathering"
    for publisher in (None, WeightPublisher(tmp_path / "weights")):
        learner.publish(1, publisher)
        assert gathered == trained, "every rank takes part"
        gathered.clear()
    target = {name: torch.zeros(value.shape) for name, value in expected.items()}
    assert WeightReader(tmp_path / "weights").refresh(target)
    assert all(np.array_equal(target[name].numpy(), value) for name, value in expected.items())


def test_adamw_is_fused_on_gpus_and_for_offloaded_state():
    """The kernels that make one pass; the numbers are those of the loop over tensors."""
    cases = [("none", False, False), ("none", True, True), ("cpu", True, True), ("cpu", False, True)]
    for offload, cuda, fused in cases:
        assert uses_fused_adamw(config(learner={"offload_optimizer": offload}).learner, cuda) is fused
    ends = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        for _ in range(5):
            optimizer.zero_grad()
            (weight.square() * torch.linspace(0, 3, 1000)).sum().backward()
            optimizer.step()
        ends.append(weight.detach())
    assert (ends[0] - ends[1]).abs().max() < 1e-6
