"""LoRA: what is trained, synced and saved, and how adapters are switched off for the reference."""

import contextlib
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.learner.learner_tools import SPEC, config, free_port, make_learner, parameters, random_batch
from tests.policies.policy_helpers import CODEC, rate
from vla_rl.config.loading import ConfigError, dump_config, load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.errors import UserError
from vla_rl.core.ipc.frozen_weights import attach_frozen_weights, share_frozen_weights
from vla_rl.core.ipc.mailbox import PoolAddress, create_pool
from vla_rl.core.ipc.shared_memory import SharedArrays, shared_root
from vla_rl.core.ipc.weights import WeightPublisher, create_weight_buffers
from vla_rl.placement.plan import Process, sharing_learner
from vla_rl.placement.processes import make_plan
from vla_rl.placement.resources import Resources
from vla_rl.policies.base.policy import PolicyInput, PolicyOutput
from vla_rl.policies.build import build_policy
from vla_rl.policies.openvla_oft.architecture import nano, openvla_7b
from vla_rl.policies.openvla_oft.checkpoint import load_adapters, load_policy, save_policy
from vla_rl.policies.openvla_oft.config import LoraConfig, OpenVLAOFTConfig
from vla_rl.policies.openvla_oft.lora import add_adapters, merged_state
from vla_rl.policies.openvla_oft.model import OpenVLAOFT
from vla_rl.policies.openvla_oft.prompt import PromptTokenizer, build_tiny_tokenizer

LORA = {"rank": 4, "alpha": 8}
OFT = ("vision", "projector", "language_model")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to start from."""
    folder = tmp_path_factory.mktemp("base") / "policy"
    save_policy(build_policy(OpenVLAOFTConfig(size="nano", chunk_size=4), SPEC, seed=3), folder, {})
    return folder


def _config(base: Path, **learner) -> RunConfig:
    return config(
        policy={"checkpoint": str(base), "chunk_size": 4, "lora": LORA},
        learner={"micro_batch": 64, "lr": 1e-3, **learner},
    )


def _observations() -> PolicyInput:
    rng = np.random.default_rng(5)
    images = torch.from_numpy(rng.integers(0, 256, (3, 1, 48, 48, 3)).astype(np.uint8))
    proprio = torch.from_numpy(rng.normal(size=(3, 3)).astype(np.float32))
    return PolicyInput(images, proprio, torch.tensor([0, 1, 0]), torch.zeros(3))


@torch.no_grad()
def _outputs(policy: nn.Module) -> PolicyOutput:
    """Of a policy, or of a learner's engine, which gathers what ZeRO-3 divides."""
    return rate(policy, _observations())


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _all_weights(learner) -> dict[str, Tensor]:
    with learner.whole_policy() as policy:
        return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def test_only_adapters_and_value_head_train_at_any_zero_stage(base):
    results = []
    for zero_stage in (0, 3):
        learner = make_learner(_config(base, zero_stage=zero_stage))
        trained = learner.policy.trained_parameters()
        adapters = {name for name in trained if not name.startswith("value_head.")}
        assert len(adapters) == 2 * len(learner.policy.adapted)
        assert all(".lora_A." in name or ".lora_B." in name for name in adapters)
        before = _all_weights(learner)
        for iteration in range(2):
            learner.update(random_batch(iteration, policy_version=iteration))
        after = _all_weights(learner)
        assert {name for name in before if not torch.equal(before[name], after[name])} == trained.keys()
        results.append(after)
    assert max(_largest(results[0][name], results[1][name]) for name in results[0]) < 1e-5


def test_the_optimizer_holds_what_trains_and_nothing_else(base):
    learner = make_learner(_config(base))
    adapters, value_head = ([id(p) for p in group["params"]] for group in learner._optimizer.param_groups)
    assert {*adapters, *value_head} == {id(p) for p in learner.policy.parameters() if p.requires_grad}
    assert value_head == [id(p) for p in learner.policy.value_head.parameters()]


def test_bf16_trains_the_same_parameters(base):
    learner = make_learner(_config(base, zero_stage=1, precision="bf16"))
    before = _all_weights(learner)
    for iteration in range(2):
        learner.update(random_batch(iteration, policy_version=iteration))
    after = _all_weights(learner)
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    assert {n for n in before if not torch.equal(before[n], after[n])} == learner.policy.trained_parameters().keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_start_the_outputs_are_the_checkpoints(base, dtype):
    plain = build_policy(OpenVLAOFTConfig(checkpoint=str(base), chunk_size=4), SPEC, 0).to(dtype)
    adapted = build_policy(OpenVLAOFTConfig(checkpoint=str(base), chunk_size=4, lora=LORA), SPEC, 0).to(dtype)
    assert adapted.adapted
    assert torch.equal(_outputs(adapted).logprobs, _outputs(plain).logprobs)
    assert torch.equal(_outputs(adapted).values, _outputs(plain).values)


def _adapted(base: Path, targets: tuple[str, ...]) -> OpenVLAOFT:
    lora = LORA | {"targets": targets}
    return build_policy(OpenVLAOFTConfig(checkpoint=str(base), chunk_size=4, lora=lora), SPEC, 0)


def test_targets_are_all_linear_layers_of_the_named_parts(base):
    plain = load_policy(base)
    linear = {name for name, m in plain.named_modules() if isinstance(m, nn.Linear)}
    linear -= {name for name in linear if name.startswith("value_head.")}
    assert _adapted(base, OFT).adapted.keys() == linear - {"lm_head"}
    assert _adapted(base, (*OFT, "lm_head")).adapted.keys() == linear, "RL4VLA"
    projector = _adapted(base, ("projector",)).adapted.keys()
    assert projector == {name for name in linear if name.startswith(("projector.", "proprio_projector."))}
    assert "proprio_projector.fc1" in projector


def test_a_weight_sync_transfers_what_trains_and_nothing_else(base, tmp_path):
    cfg = _config(base)
    learner = make_learner(cfg)
    learner.update(random_batch())
    create_weight_buffers(tmp_path / "weights", learner.published_nbytes())
    learner.publish(1, WeightPublisher(tmp_path / "weights"))
    nbytes = SharedArrays.attach(tmp_path / "weights")["buffers"].shape[1]
    trained = [p for p in learner.policy.parameters() if p.requires_grad]
    assert 0 <= nbytes - sum(4 * p.numel() for p in trained) < 64 * len(trained), "each is aligned"
    assert nbytes < 0.25 * sum(4 * p.numel() for p in learner.policy.parameters())

    actor = _inference_process(cfg, tmp_path)._server.policy
    assert _largest(_outputs(actor.policy).logprobs, _outputs(learner.policy).logprobs) > 1e-4
    assert actor.refresh() == 1
    assert torch.equal(_outputs(actor.policy).logprobs, _outputs(learner.policy).logprobs)
    assert torch.equal(_outputs(actor.policy).values, _outputs(learner.policy).values)


def _inference_process(cfg: RunConfig, folder: Path):
    """Connected to the weights published in ``folder``."""
    from vla_rl.cluster.processes.inference import InferenceProcess

    address = PoolAddress(str(folder), "server0", 1, 2)
    create_pool(address, SPEC, cfg.policy.spec(SPEC))
    process = InferenceProcess(cfg, SPEC, Process("inference server", 0, "cpu", (0,), 1, None), folder / "locks")
    process.build()
    process.connect(address, folder / "weights", 2)
    return process


def _matrix_products(policy: nn.Module) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _outputs(policy)
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::addmm", "aten::mm"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_server_that_merges_adapters_acts_as_the_learner_after_every_sync(base, tmp_path, precision):
    cfg = _config(base, precision=precision).with_values({"policy.lora.merge_to_act": True})
    learner = make_learner(cfg)
    create_weight_buffers(tmp_path / "weights", learner.published_nbytes())
    publisher, tolerance = WeightPublisher(tmp_path / "weights"), {"fp32": 1e-5, "bf16": 0.2}[precision]
    learner.publish(0, publisher)
    actor = _inference_process(cfg, tmp_path)._server.policy
    for version in (1, 2, 3):
        actor.offload()
        actor.onload()
        before = _outputs(learner.policy).logprobs
        learner.update(random_batch())
        learner.publish(version, publisher)
        assert actor.refresh() == version
        found, expected = _outputs(actor.policy), _outputs(learner.policy)
        assert _largest(before, expected.logprobs) > 1e-3, "the update changed nothing"
        assert _largest(found.logprobs, expected.logprobs) < tolerance
        merged, used = merged_state(learner.policy), actor.policy.state_dict()
        for path in actor.policy.adapted:
            assert torch.equal(used[f"{path}.base_layer.weight"], merged[f"{path}.weight"]), "errors would add up"
    actor.offload()
    actor.onload()
    assert torch.equal(_outputs(actor.policy).logprobs, found.logprobs), "the host had those of an earlier version"
    assert _matrix_products(learner.policy) - _matrix_products(actor.policy) == 2 * len(actor.policy.adapted)
    assert not actor.policy.has_reference, "the original weights are on the host"


def test_frozen_weights_are_shared_and_not_copied(base, tmp_path):
    before = set(shared_root().glob("torch_*"))
    cfg = _config(base)
    learner = make_learner(cfg)
    server = build_policy(cfg.policy, SPEC, 0)
    own = {name: p.data_ptr() for name, p in server.named_parameters()}
    attach_frozen_weights(server, share_frozen_weights(learner.policy, tmp_path / "frozen"))
    assert torch.equal(_outputs(server).logprobs, _outputs(learner.policy).logprobs)
    frozen = {name for name, p in server.named_parameters() if not p.requires_grad}
    assert {name for name, p in server.named_parameters() if p.data_ptr() != own[name]} == frozen
    trained = parameters(learner)
    learner.update(random_batch())
    assert any(not np.array_equal(trained[name], p) for name, p in parameters(learner).items())
    shared = dict(learner.policy.named_parameters())
    with torch.no_grad():
        shared[min(frozen)].add_(1.0)
    attached = dict(server.named_parameters())
    assert all(torch.equal(attached[name], shared[name]) for name in frozen), "both see one memory"
    other = build_policy(cfg.policy, SPEC, 0)
    other.language_model.double()
    with pytest.raises(ValueError, match="differ from the shared ones, such as language_model"):
        attach_frozen_weights(other, share_frozen_weights(learner.policy, tmp_path / "frozen"))
    assert set(shared_root().glob("torch_*")) == before, "all of it goes with the run's folder"
    assert [path.name for path in tmp_path.iterdir()] == ["frozen"], "once, for all servers"


@pytest.mark.parametrize(
    ("placement", "others", "attaches"),
    [
        ({"mode": "collocated"}, {}, True),
        ({"mode": "pipelined"}, {}, False),
        ({"mode": "collocated", "offload": "always"}, {}, False),
        ({"mode": "collocated"}, {"learner.zero_stage": 3}, False),
        ({"mode": "collocated"}, {"policy.lora.merge_to_act": True}, False),
    ],
)
def test_servers_on_the_learners_device_attach_its_frozen_weights(base, placement, others, attaches):
    cfg = config(policy={"checkpoint": str(base), "chunk_size": 4, "lora": LORA}, placement=placement)
    cfg = cfg.with_values(others)
    plan = make_plan(cfg, Resources(cores=8, devices=2, kind="cuda"))
    assert [sharing_learner(cfg, plan, s) for s in plan.servers] == [
        s.index if attaches else None for s in plan.servers
    ]
    plain = config(placement=placement)
    assert sharing_learner(plain, plan, plan.servers[0]) is None, "all weights train"


def test_a_7b_weight_sync_is_small():
    """The figures of docs/architecture.md, on weights without memory."""
    arch = openvla_7b()
    tokenizer = PromptTokenizer(build_tiny_tokenizer(["push it"], arch.text_vocab_size), arch)
    with torch.device("meta"):
        policy = OpenVLAOFT(arch, CODEC, tokenizer)
        whole = sum(p.numel() for p in policy.trained_parameters().values())
        add_adapters(policy, LoraConfig(), seed=0)
    trained = sum(p.numel() for p in policy.trained_parameters().values())
    assert whole == pytest.approx(7.5e9, rel=0.002)
    assert trained == pytest.approx(115e6, rel=0.005)


def test_merging_keeps_one_merged_weight_on_the_device_at_a_time(monkeypatch):
    """Weights without memory stand for a device's: the merged ones come to the host, one after the other."""
    arch = nano()
    tokenizer = PromptTokenizer(build_tiny_tokenizer(["push it"], arch.text_vocab_size), arch)
    with torch.device("meta"):
        policy = OpenVLAOFT(arch, CODEC, tokenizer)
        add_adapters(policy, LoraConfig(rank=2), seed=0)
    on_device: list[weakref.ref] = []

    def to_host(tensor: Tensor) -> Tensor:
        assert not any(ref() is not None for ref in on_device)
        on_device.append(weakref.ref(tensor))
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(Tensor, "cpu", to_host)
    state = merged_state(policy)
    assert len(on_device) == len(policy.adapted)
    assert {path for path in policy.adapted if state[f"{path}.weight"].device.type == "cpu"} == policy.adapted.keys()


def test_without_lora_everything_trains_and_is_synced():
    policy = build_policy(OpenVLAOFTConfig(size="nano", chunk_size=4), SPEC, 0)
    assert not policy.adapted
    assert list(policy.trained_parameters()) == [name for name, _ in policy.named_parameters()]


def _process(cfg: RunConfig, folder: Path, state: Path | None = None, version: int = 0):
    from vla_rl.cluster.processes.learner import LearnerProcess

    process = LearnerProcess(cfg, SPEC, Process("learner", 0, "cpu", (0,), 1, None), 1, folder / "locks")
    folder.mkdir()
    process.setup(("127.0.0.1", free_port()), folder / "weights", state, version)
    return process


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_run_saves_a_plain_policy_and_resumes_its_adapters_exactly(base, tmp_path, zero_stage):
    cfg = _config(base, zero_stage=zero_stage)
    straight = _process(cfg, tmp_path / "straight")
    straight.update(random_batch(0))
    live = straight._learner
    adapters = parameters(live)
    straight.snapshot(tmp_path / "000001", {})
    assert straight.write(tmp_path / "000001").problem is None
    assert all(np.array_equal(adapters[name], p) for name, p in parameters(live).items()), "saving changes nothing"

    plain, start = load_policy(tmp_path / "000001" / "policy"), load_policy(base)
    assert plain.state_dict().keys() == start.state_dict().keys()
    for policy in (plain, start):
        policy.set_instructions(SPEC.instructions)
    now = _outputs(live._engine)
    assert _largest(_outputs(plain).logprobs, now.logprobs) < 1e-5
    assert _largest(_outputs(plain).values, now.values) < 1e-5
    assert _largest(_outputs(start).logprobs, now.logprobs) > 1e-3
    assert not torch.equal(plain.lm_head.weight, start.lm_head.weight)
    apart, alpha = load_adapters(tmp_path / "000001" / "policy")
    assert alpha == LORA["alpha"]
    a, b = (apart[f"language_model.layers.0.mlp.up_proj.lora_{matrix}"] for matrix in "AB")
    weights = [policy.state_dict()["language_model.layers.0.mlp.up_proj.weight"] for policy in (plain, start)]
    assert torch.allclose(weights[0] - weights[1], b @ a * (LORA["alpha"] / LORA["rank"]), atol=1e-6)

    resumed = _process(cfg, tmp_path / "resumed", tmp_path / "000001" / "learner", 1)
    assert all(np.array_equal(adapters[name], p) for name, p in parameters(resumed._learner).items())
    for process in (straight, resumed):
        process.update(random_batch(1, policy_version=1))
    ours, theirs = parameters(live), parameters(resumed._learner)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert not all(np.array_equal(ours[name], adapters[name]) for name in ours)


def test_a_learners_state_holds_no_frozen_weights_and_fits_its_own_policy_only(base, tmp_path):
    learner = make_learner(_config(base))
    learner.save(tmp_path)
    saved = load_file(tmp_path / "state/0-of-1.safetensors")
    assert {key.rpartition(":")[0] for key in saved} == learner.policy.trained_parameters().keys()
    for lora in (LORA | {"rank": 8}, LORA | {"targets": OFT}, None):
        other = make_learner(config(policy={"checkpoint": str(base), "chunk_size": 4, "lora": lora}))
        with pytest.raises(UserError, match=r"other weights .* resume with the run's own keys of the group policy"):
            other.load(tmp_path)


def test_the_reference_is_the_checkpoint_and_a_look_at_it_changes_nothing(base):
    start = load_policy(base)
    start.set_instructions(SPEC.instructions)
    undisturbed = make_learner(_config(base))
    for iteration in range(2):
        undisturbed.update(random_batch(iteration, policy_version=iteration))
    theirs = parameters(undisturbed)
    for zero_stage, tolerance in ((0, 0.0), (3, 1e-5)):
        learner = make_learner(_config(base, zero_stage=zero_stage))
        learner.update(random_batch(0))
        trained = learner.policy.trained_parameters().keys()
        with learner.policy.reference():
            assert torch.equal(_outputs(learner._engine).logprobs, _outputs(start).logprobs)
        assert learner.policy.trained_parameters().keys() == trained
        assert _largest(_outputs(learner._engine).logprobs, _outputs(start).logprobs) > 1e-3
        learner.update(random_batch(1, policy_version=1))
        ours = parameters(learner)
        assert max(np.abs(ours[name] - theirs[name]).max() for name in theirs) <= tolerance


def test_the_divergence_is_from_the_policy_without_its_adapters(base):
    cfg = _config(base)
    cfg = cfg.with_values({"algo.kl_coef": 1.0, "algo.minibatches": 1})
    learner = make_learner(cfg)
    assert learner._copy is None, "no second copy of the weights"
    assert learner.update(random_batch(0))["learner/reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert learner.update(random_batch(1, policy_version=1))["learner/reference_kl"] > 1e-7


def test_the_reference_ends_with_its_block(base):
    policy = _adapted(base, OFT)
    with torch.no_grad():
        for layer in policy.adapted.values():
            layer.lora_B["default"].weight.normal_(std=0.1)
    before = _outputs(policy).logprobs
    with contextlib.suppress(KeyError), policy.reference():
        inside = _outputs(policy).logprobs
        raise KeyError
    assert _largest(inside, before) > 1e-3
    assert torch.equal(_outputs(policy).logprobs, before)


def test_without_adapters_there_is_no_reference(base):
    with pytest.raises(RuntimeError, match=r"set policy\.lora"), load_policy(base).reference():
        pass


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("policy.lora.rank=0", "policy.lora.rank=0 (command line): must be at least 1"),
        ("policy.lora.alpha=0", "policy.lora.alpha=0 (command line): must be at least 1"),
        ("policy.lora.targets=[]", "policy.lora.targets=[] (command line): must have at least 1 items"),
        (
            "policy.lora.targets=[lm_haed]",
            "policy.lora.targets[0]=lm_haed (command line): unknown value; did you mean lm_head? "
            "allowed: vision, projector, language_model, lm_head",
        ),
        ("policy.lora.rnk=8", "policy.lora.rnk=8 (command line): unknown key; did you mean policy.lora.rank?"),
        (
            "policy.lora=32",
            "policy.lora=32 (command line): is a group of keys; set one of "
            "policy.lora.rank, policy.lora.alpha, policy.lora.targets, policy.lora.merge_to_act",
        ),
    ],
)
def test_mistakes_in_the_config(override, problem):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert caught.value.problems == (problem,)


def test_published_settings_can_be_said(tmp_path):
    rl4vla = load_config(None, ["policy.lora={}"]).policy.lora
    assert (rl4vla.rank, rl4vla.alpha, rl4vla.targets) == (32, 16, (*OFT, "lm_head"))
    oft = load_config(None, ["policy.lora.targets=[vision,projector,language_model]"])
    assert oft.policy.lora.targets == OFT
    (tmp_path / "run.yaml").write_text(dump_config(oft))
    assert load_config(tmp_path / "run.yaml") == oft
    assert load_config(tmp_path / "run.yaml", ["policy.lora=null"]).policy.lora is None


def test_evaluation_takes_the_merged_policy_as_it_is(base, tmp_path):
    from vla_rl.commands.evaluate import evaluated_config

    (tmp_path / "config.yaml").write_text(dump_config(_config(base)))
    (tmp_path / "checkpoints/000001/policy").mkdir(parents=True)
    policy = evaluated_config(tmp_path, None, [], give="", best=False).policy
    assert (policy.checkpoint, policy.lora) == (str(tmp_path / "checkpoints/000001/policy"), None)
