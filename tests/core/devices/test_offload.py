"""What is offloaded comes back bit for bit; meanwhile nothing of it is left on the device."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.learner.learner_tools import SPEC, config, make_learner, parameters, random_batch, run_ranks
from vla_rl.config.run_config import RunConfig
from vla_rl.core.devices import offload
from vla_rl.core.devices.offload import Offloader
from vla_rl.core.records import Observation
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.learner.deepspeed_engine import tensors_held
from vla_rl.policies.build import build_policy
from vla_rl.policies.openvla_oft.checkpoint import save_policy
from vla_rl.policies.openvla_oft.config import OpenVLAOFTConfig

CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 8}


# --- tensors --------------------------------------------------------------------------------------------------------


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_storages_move_and_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_BLOCK_BYTES", 1000)  # so that storages cross from one block into the next
    flat = torch.arange(1000.0)
    part = nn.Parameter(flat[100:200])
    part.grad = torch.full((100,), 3.0)
    half = torch.arange(700).to(torch.bfloat16)
    zeros = torch.zeros(5000)
    fixed = torch.arange(333, dtype=torch.int16)
    before = [x.clone() for x in (flat, part, part.grad, half, zeros, fixed)]
    mover = Offloader(CPU, lambda: (part, flat, part.grad, half, zeros), constant=[fixed])
    blocks = set()
    for _ in range(3):
        mover.offload()
        mover.offload()
        assert mover.offloaded
        assert [_storage_bytes(x) for x in (flat, part, part.grad, half, zeros, fixed)] == [0] * 6
        assert mover.gib * 2**30 == 4000 + 400 + 1400 + 20000 + 666, "what is shared counts once"
        mover.onload()
        mover.onload()
        assert not mover.offloaded
        for tensor, was in zip((flat, part, part.grad, half, zeros, fixed), before, strict=True):
            assert torch.equal(tensor, was)
        blocks.add(tuple(block.data_ptr() for block in mover._host._blocks))
    assert len(blocks) == 1, "host memory is allocated once"
    assert len(blocks.pop()) == 7, "zeros need none"
    part.data += 1
    assert flat[150] == 151, "views are views of the same memory"


def test_what_is_constant_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, other = torch.arange(10.0), torch.arange(20.0)
    mover = Offloader(CPU, lambda: (fixed, other), constant=[fixed])
    mover.offload()
    mover.onload()
    fixed[0], other[0] = 7.0, 7.0
    mover.offload()
    mover.onload()
    assert (fixed[0], other[0]) == (0.0, 7.0)


def test_memory_that_is_not_the_allocators_is_copied_first() -> None:
    mapped = torch.from_numpy(np.arange(6.0))[2:]
    mover = Offloader(CPU, lambda: [mapped])
    mover.offload()
    assert _storage_bytes(mapped) == 0
    mover.onload()
    assert mapped.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_a_policy_acts_after_offloading_as_before(tmp_path: Path) -> None:
    save_policy(build_policy(OpenVLAOFTConfig(size="nano", chunk_size=4), SPEC, seed=3), tmp_path / "policy", {})
    for lora in (None, LORA):
        settings = OpenVLAOFTConfig.model_validate(
            {"checkpoint": str(tmp_path / "policy"), "chunk_size": 4, "lora": lora}
        )
        runner = PolicyRunner(build_policy(settings, SPEC, 0), RunConfig(policy=settings), None, "cpu")
        rng = np.random.default_rng(0)
        seen = Observation(
            images=rng.integers(0, 256, (3, 1, 48, 48, 3)).astype(np.uint8),
            proprio=rng.normal(size=(3, 3)).astype(np.float32),
            task=np.array([0, 1, 0], np.int32),
            elapsed=np.zeros(3, np.float32),
        )
        draws = {"uniforms": rng.random((3, 4, 7)).astype(np.float32)}
        before = runner.act(seen, draws, np.zeros(3, bool))
        runner.offload()
        assert not any(_storage_bytes(p) for p in runner.policy.parameters())
        runner.onload()
        after = runner.act(seen, draws, np.zeros(3, bool))
        assert np.array_equal(before.record["tokens"], after.record["tokens"])
        assert np.array_equal(before.logprobs, after.logprobs)


# --- a learner ------------------------------------------------------------------------------------------------------


def _config(base: Path | None = None, **learner: Any) -> RunConfig:
    """All weights and a copy as reference, or, from a checkpoint, adapters."""
    policy: dict[str, Any] = {"size": "nano"} if base is None else {"checkpoint": str(base), "lora": LORA}
    return config(
        policy={"name": "openvla_oft", "chunk_size": 4} | policy,
        learner={"micro_batch": 8, "lr": 1e-3, **learner},
        algo={"name": "ppo", "minibatches": 2, "kl_coef": 0.1, "proximal": "recomputed"},
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "policy"
    save_policy(build_policy(OpenVLAOFTConfig(size="nano", chunk_size=4), SPEC, seed=3), folder, {})
    return folder


def _trained(learner: Any, versions: range, *, offload: bool = False) -> list[dict[str, float]]:
    """``offload``: the learner is on the device only during its updates."""
    metrics = []
    for version in versions:
        if offload:
            learner.onload()
        metrics.append(learner.update(random_batch(version, policy_version=version)))
        learner.publish(version + 1, None)
        if offload:
            learner.offload()
    return metrics


def _held(learner: Any) -> list[Tensor]:
    reference = [] if learner._copy is None else list(learner._copy.parameters())
    found = tensors_held(list(learner.policy.parameters()), reference, learner._engine.optimizer)
    return [x for x in found if x.device.type != "meta"]  # sizes without memory, which ZeRO-1 and 2 keep


def _live_storages() -> dict[int, int]:
    """Bytes of every storage below any tensor that Python knows, by address."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.device.type == "cpu"]
    return {x.untyped_storage().data_ptr(): _storage_bytes(x) for x in tensors}


EVERYTHING = [(stage, precision, lora) for stage in range(4) for precision in ("fp32", "bf16") for lora in (0, 1)]
QUICK = [(0, "fp32", 0), (1, "bf16", 1), (2, "fp32", 1), (3, "bf16", 0)]
ALL_PAIRS = [*QUICK, (0, "bf16", 1), (1, "fp32", 0), (2, "bf16", 0), (3, "fp32", 1)]  # of stage, precision, adapters


def _case(case: tuple[int, str, int]) -> Any:
    marks = [] if case in QUICK else [pytest.mark.slow if case in ALL_PAIRS else pytest.mark.exhaustive]
    return pytest.param(*case, marks=marks)


@pytest.mark.parametrize(("zero_stage", "precision", "lora"), [_case(case) for case in EVERYTHING])
def test_training_is_equal_to_the_bit(base: Path, zero_stage: int, precision: str, lora: bool) -> None:
    cfg = _config(base if lora else None, zero_stage=zero_stage, precision=precision)
    before = _live_storages()
    moving = make_learner(cfg)
    moving.offload()
    ours = _trained(moving, range(2), offload=True)
    assert moving._memory.offloaded
    kept = {block.data_ptr() for block in moving._memory._host._blocks}
    left = {at: size for at, size in _live_storages().items() if at not in before.keys() | kept}
    assert sum(left.values()) < 2000, "numbers, not tensors"
    assert not any(_storage_bytes(x) for x in _held(moving))

    staying = make_learner(cfg)
    theirs = _trained(staying, range(2))
    assert [x.pop("learner/offloaded_gib") > 0 for x in ours] == [True] * 2
    for mine, others in zip(ours, theirs, strict=True):  # a value's last bit depends on where in memory its input lies
        assert mine == pytest.approx(others, rel=1e-5, abs=1e-8)
    moving.onload()
    a, b = parameters(moving), parameters(staying)
    assert all(np.array_equal(a[name], b[name]) for name in b)
    with moving.whole_policy() as one, staying.whole_policy() as other:
        whole = other.state_dict()
        assert all(torch.equal(x, whole[name]) for name, x in one.state_dict().items())


def test_a_forward_pass_without_the_weights_is_refused() -> None:
    learner = make_learner(_config())
    learner.offload()
    batch = random_batch()
    rows = np.arange(2)
    for model in (learner._engine, learner._copy):
        with pytest.raises(RuntimeError, match=r"call onload\(\) first"):
            learner._passes.of_chunks(model, batch, rows)
    learner.onload()
    learner.onload()
    learner._passes.of_chunks(learner._engine, batch, rows)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_checkpoint_between_offloads(base: Path, tmp_path: Path, zero_stage: int) -> None:
    cfg = _config(base, zero_stage=zero_stage)
    learner = make_learner(cfg)
    _trained(learner, range(2), offload=True)
    learner.onload()
    learner.save(tmp_path)
    learner.offload()
    resumed = make_learner(cfg)
    resumed.load(tmp_path)
    resumed.offload()
    for one in (learner, resumed):
        _trained(one, range(2, 4), offload=True)
        one.onload()
    a, b = parameters(learner), parameters(resumed)
    assert all(np.array_equal(a[name], b[name]) for name in b)


def test_a_learner_counts_the_seconds() -> None:
    learner = make_learner(_config())
    assert _trained(learner, range(1))[0].get("learner/offloaded_gib") is None
    learner.offload()
    seconds = learner.meter.snapshot()
    assert seconds["offload_s"] > 0
    assert "onload_s" not in seconds
    learner.onload()
    assert learner.meter.snapshot()["onload_s"] > 0


def _compare_on_rank(rank: int, world_size: int, port: int, zero_stage: int, precision: str) -> bool:
    cfg = _config(ranks=world_size, zero_stage=zero_stage, precision=precision)
    ours, theirs = (make_learner(cfg, rank, world_size, port) for _ in range(2))
    ours.offload()
    for learner in (ours, theirs):
        _trained(learner, range(2), offload=learner is ours)
    ours.onload()
    a, b = parameters(ours), parameters(theirs)
    return all(np.array_equal(a[name], b[name]) for name in b)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("zero_stage", "precision"), [(1, "bf16"), (2, "fp32"), (3, "fp32")])
def test_ranks_that_share_a_state(zero_stage: int, precision: str) -> None:
    assert run_ranks(_compare_on_rank, 2, zero_stage, precision) == [True, True]


# --- a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.exhaustive)])
def test_a_run_that_offloads_trains_evaluates_saves_and_resumes(tmp_path: Path, mode: str) -> None:
    from vla_rl.commands.train import train

    cfg = RunConfig.model_validate(
        {
            "mode": mode,
            # shaped: where all episodes return the same, the policy makes no step, and has no moments
            "env": {"name": "tabletop", "max_episode_steps": 16, "shaping": 1.0},
            "policy": {"name": "openvla_oft", "size": "nano", "chunk_size": 4},
            "train": {"iterations": 2, "batch_episodes": 4, "eval_episodes": 2, "eval_every": 1, "checkpoint_every": 1},
            "placement": {"mode": "collocated", "devices": 1, "env_workers": 1, "offload": "always"},
            "log": {"dir": str(tmp_path), "name": "run", "video": False, "tensorboard": False},
        }
    )
    assert train(cfg) == 0
    more = cfg.model_copy(update={"train": cfg.train.model_copy(update={"iterations": 3})})
    assert train(more, resume=tmp_path / "run") == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [m["iteration"] for m in metrics] == [0, 1, 2, 3]
    assert all(m["eval/greedy_success"] >= 0 for m in metrics)
    assert all(0 < m["busy/learner_offload"] < 1 for m in metrics[1:])
    weights = 4 * sum(p.numel() for p in build_policy(cfg.policy, SPEC, 0).parameters()) / 2**30
    assert metrics[1]["learner/offloaded_gib"] == pytest.approx(weights, rel=0.2)
    assert metrics[2]["learner/offloaded_gib"] == pytest.approx(3 * weights, rel=0.2)
