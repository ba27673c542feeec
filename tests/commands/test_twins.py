"""Twins of the published checkpoints on LIBERO: read, trained by PPO and by GRPO, evaluated, exported, read again.

Simulator, inference server, store and learner are the real ones. They share the test's process, which saves starting
processes for each layout; one layout also goes through the commands.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from algos import make_algorithm
from envs import make_env
from envs.base import VectorEnv
from envs.libero.protocol.suites import suite_tasks
from tests.learner.learner_tools import free_port, parameters
from tests.policies.openvla_reference import VOCAB, llama_tokenizer, read_folder
from tests.policies.openvla_twins import LAYOUTS, l1_head
from vla_rl.commands.cli import main
from vla_rl.config.run_config import RunConfig
from vla_rl.core.ipc.mailbox import PoolAddress, ServerMailbox, WorkerMailbox, create_pool
from vla_rl.core.ipc.weights import WeightPublisher, WeightReader, create_weight_buffers
from vla_rl.core.records import SuperBatch
from vla_rl.inference.inference_server import BatchRule, InferenceServer
from vla_rl.inference.policy_runner import PolicyRunner
from vla_rl.learner.learner import Learner
from vla_rl.learner.process_group import join_ranks
from vla_rl.policies.base.policy import PolicyInput
from vla_rl.policies.build import build_policy, check_policy, save_policy
from vla_rl.policies.openvla_oft.checkpoint import load_policy
from vla_rl.policies.openvla_oft.hf_folder import open_published
from vla_rl.policies.openvla_oft.hf_reader import load_published
from vla_rl.policies.openvla_oft.trunk import OpenVLA
from vla_rl.replay.rules import StoreRules
from vla_rl.replay.schedule import evaluation_episodes
from vla_rl.replay.store import ReplayStore
from vla_rl.rollout.env_worker import EnvWorker

pytestmark = [pytest.mark.slow, pytest.mark.libero]

LIBERO = {
    "name": "libero",
    "tasks": [0],
    "image_size": 64,  # the twins see 56 pixels
    "max_episode_steps": 4,
    "settle_steps": 0,
    "antialiasing": False,
}
GRPO = {"group_size": 2, "minibatches": 1, "max_filtered": 0}  # keeps groups that all fail
DECODING = {
    "openvla": ("autoregressive", False),
    "openvla-oft": ("parallel", True),
    "openvla-oft-l1": ("parallel", True),
    "openvla-oft-film": ("parallel", True),
    "openvla-oft-unmerged": ("parallel", True),
    "simplevla-rl": ("parallel", True),
    "rl4vla": ("autoregressive", False),
    "rl4vla-lora": ("autoregressive", False),
    "rlinf": ("parallel", False),
}


def config_of(layout: str, folder: Path, algo: str = "ppo") -> RunConfig:
    oft = layout.startswith("openvla-oft")
    seen = {"wrist_camera": oft, "proprio": oft}
    groups: dict[str, Any] = {
        "env": LIBERO | seen,
        "policy": {"name": "openvla_oft", "checkpoint": str(folder), "chunk_size": 2, "temperature": 1.3},
        "algo": {"name": algo, **(GRPO if algo == "grpo" else {"minibatches": 1})},
        "learner": {"lr": 1e-3, "micro_batch": 2},
        "train": {"batch_episodes": 2, "iterations": 1},
    }
    return RunConfig.model_validate(groups)


class Simulators:
    """One simulator for each set of observations, all in one thread: an OpenGL context belongs to a thread."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "simulator")
        self._envs: dict[int, VectorEnv] = {}

    def of(self, config: RunConfig) -> VectorEnv:
        views = 1 + config.env.wrist_camera
        if views not in self._envs:
            self._envs[views] = self.thread.submit(make_env, config.env, 2).result()
        return self._envs[views]

    def close(self) -> None:
        for env in self._envs.values():
            self.thread.submit(env.close).result()
        self.thread.shutdown()


@pytest.fixture(scope="module")
def simulators() -> Iterator[Simulators]:
    with closing(Simulators()) as found:
        yield found


@contextmanager
def running(
    folder: Path, config: RunConfig, simulators: Simulators, env: VectorEnv, runner: PolicyRunner
) -> Iterator[ReplayStore]:
    """Worker, server and store, in threads."""
    store = ReplayStore(StoreRules.of(config, env.spec))
    address, spec = PoolAddress(str(folder), "server0", 1, env.num_envs), config.policy.spec(env.spec)
    create_pool(address, env.spec, spec)
    server = InferenceServer(runner, ServerMailbox(address), BatchRule(env.num_envs, 0.01))
    worker = EnvWorker(0, env, WorkerMailbox(address, 0), store, spec, 1)
    serving, playing = threading.Thread(target=server.run), simulators.thread.submit(worker.run)
    serving.start()
    try:
        yield store
    finally:
        for part in (worker, server, store):
            part.stop()
        serving.join(30.0)
        playing.result(30.0)


def learner_of(config: RunConfig, env: VectorEnv) -> Learner:
    join_ranks(0, 1, ("127.0.0.1", free_port()), "cpu")
    policy = build_policy(config.policy, env.spec, config.seed)
    return Learner(config, policy, make_algorithm(config.algo), rank=0, world_size=1, device="cpu")


def update(learner: Learner, batch: SuperBatch) -> None:
    """One update, which must begin with the log-probabilities that were sampled."""
    before = parameters(learner)
    found = learner._passes.evaluate(learner._engine, batch)
    assert np.abs(found.logprobs - batch.logprobs).max() < 1e-4
    metrics = learner.update(batch)
    after = parameters(learner)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {name.split(".")[0] for name in changed} >= {"dino", "siglip", "projector", "language_model"}
    assert changed & {"lm_head.weight", "action_head.fc2.weight"}
    assert np.isfinite(metrics["learner/grad_norm"])
    assert metrics["learner/grad_norm"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_is_trained_and_written(layout: str, tmp_path: Path, simulators: Simulators) -> None:
    twin = LAYOUTS[layout](tmp_path / "twin", 0)
    config, grpo = config_of(layout, twin), config_of(layout, twin, "grpo")
    env = simulators.of(config)
    check_policy(config.policy, env.spec)
    policy = build_policy(config.policy, env.spec, config.seed)
    assert isinstance(policy, OpenVLA)
    arch = policy.architecture
    assert (arch.decoding, arch.stop_token) == DECODING[layout]
    assert (arch.jpeg, arch.resize, arch.center_crop, arch.crop_rounding) == (True, "lanczos", True, "truncate")
    learner = learner_of(config, env)
    create_weight_buffers(tmp_path / "weights", learner.published_nbytes())
    runner = PolicyRunner(policy, config, WeightReader(tmp_path / "weights"), "cpu")
    with running(tmp_path, grpo, simulators, env, runner) as store:  # whose episodes have groups
        batch = store.next_batch(60.0)
        assert batch is not None
        assert (batch.num_episodes, batch.logprobs.shape[1:]) == (2, (2, 7))
        rewards = np.zeros_like(batch.rewards)
        rewards[0, 0] = 1.0  # no random policy succeeds, and without a reward GRPO has nothing to learn
        batch = replace(batch, rewards=rewards)
        update(learner, batch)
        update(learner_of(grpo, env), batch)
        learner.publish(1, WeightPublisher(tmp_path / "weights"))
        store.assign_evaluation(evaluation_episodes(0, 2, 1, env.spec.init_states, 0, greedy=True))
        results = store.evaluation_results(2, 60.0)
    assert [result.newest_policy_version for result in results] == [1, 1]
    save_policy(config.policy, learner.policy, tmp_path / "ours", {})
    assert_written(layout, tmp_path / "ours", twin, tmp_path / "written", env)


def assert_written(layout: str, ours: Path, twin: Path, output: Path, env: VectorEnv) -> None:
    """Export, then compare what our reader and the reference find in the new folder with our checkpoint."""
    form = "openvla-oft" if layout.startswith("openvla-oft") else "openvla"
    arguments = ["export", ours, "--format", form, "--source", twin, "--output", output]
    assert main([str(argument) for argument in arguments]) == 0
    first = load_policy(ours).eval()
    again = load_published(open_published(output), views=first.architecture.views, chunk_size=2).eval()
    assert again.architecture == first.architecture
    state, found = (with_class_token(policy) for policy in (first, again))
    assert [name for name in state if not torch.equal(state[name], found[name])] == []
    for policy in (first, again):
        policy.set_instructions(env.spec.instructions)
    compare_with_reference(again, output)


def with_class_token(policy: OpenVLA) -> dict[str, Tensor]:
    """The state dict with the position of DINOv2's class token added to the token: the layout has no place for it."""
    state, token, positions = policy.state_dict(), "dino.embeddings.cls_token", "dino.embeddings.position_embeddings"
    patches = torch.cat([torch.zeros_like(state[token]), state[positions][:, 1:]], 1)
    return state | {token: state[token] + state[positions][:, :1], positions: patches}


@torch.no_grad()
def compare_with_reference(policy: OpenVLA, folder: Path) -> None:
    """Logits or means of a chunk, from images of the model's size that neither compresses nor crops."""
    arch = replace(policy.architecture, jpeg=False, center_crop=False)
    policy.architecture = arch
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (1, arch.views, 56, 56, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.rand(1, arch.proprio_dim, generator=generator) - 0.5
    tokens = torch.randint(0, 256, (1, 2, 7), dtype=torch.uint8, generator=generator)
    seen = PolicyInput(images, proprio, torch.zeros(1).long(), torch.zeros(1))
    given = (tokens,) if arch.head == "tokens" else ()
    ours = policy.distribution(seen, 1.0, *given)[0].flatten(1, 2)[0]
    model = read_folder(folder)
    question = f"In: What action should the robot take to {policy.instructions[0].lower()}?\nOut: "
    prompt = llama_tokenizer().encode(question).ids
    views = [model.patches(image, arch.dino_mean, arch.dino_std, prompt) for image in images.unbind(1)]
    patches = torch.cat(views, 1)
    if arch.decoding == "autoregressive":
        ids = [VOCAB - 1 - number for number in tokens.flatten().tolist()]
        theirs = model.autoregressive_logits(patches[0], prompt, ids)
    else:
        token = proprio_token(proprio, folder) if arch.proprio_dim else None
        options = {"proprio": token, "stop": arch.stop_token}
        if arch.head == "l1":
            head = l1_head()
            head.load_state_dict(load_file(folder / "action_head.safetensors"))
            theirs = head(model.parallel_states(patches, prompt, 14, **options), 2).flatten()
        else:
            theirs = model.parallel_logits(patches, prompt, 14, **options)[0]
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-4


def proprio_token(proprio: Tensor, folder: Path) -> Tensor:
    """OpenVLA-OFT's: normalized by the percentiles, then two layers."""
    (entry,) = json.loads((folder / "dataset_statistics.json").read_text()).values()
    low, high = (torch.tensor(entry["proprio"][name]) for name in ("q01", "q99"))
    normal = (2 * (proprio - low) / (high - low + 1e-8) - 1).clamp(-1, 1)
    weights = load_file(folder / "proprio_projector.safetensors")
    hidden = torch.nn.functional.gelu(normal @ weights["fc1.weight"].T + weights["fc1.bias"])
    return hidden @ weights["fc2.weight"].T + weights["fc2.bias"]


def two_tasks(folder: Path) -> Path:
    """One task twice, once with a goal that holds from the start: without a reward, no policy makes a step."""
    folder.mkdir()
    task = suite_tasks("libero_spatial")[0]
    text, goal = task.bddl_file.read_text(), "(On akita_black_bowl_1 plate_1)"
    assert goal in text
    (folder / "hard.bddl").write_text(text)
    (folder / "done.bddl").write_text(text.replace(goal, "(True plate_1)"))
    return folder


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_a_published_checkpoint_goes_through_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train adapters by the published config of LIBERO, evaluate, and export them alone and merged."""
    twin = LAYOUTS["openvla"](tmp_path / "twin", 0)
    settings = LIBERO | {"suite": str(two_tasks(tmp_path / "libero_spatial")), "tasks": [0, 1]}
    small = [f"env.{name}={json.dumps(value)}" for name, value in settings.items() if name != "name"]
    small += ["policy.chunk_size=2", "policy.lora.rank=2"]  # env.proprio follows the folder
    small += ["train.iterations=1", "train.batch_episodes=2", "train.eval_episodes=0", "algo.value_warmup=0"]
    small += ["placement.env_workers=1", "placement.envs_per_worker=1", "algo.minibatches=1", "log.video=false"]
    run = [f"policy.checkpoint={twin}", f"log.dir={tmp_path}", "log.name=run"]
    assert main(["train", "configs/libero_ppo.yaml", *run, *small]) == 0
    assert main(["eval", str(tmp_path / "run"), "--episodes", "1"]) == 0
    for form in ("lora", "openvla"):
        assert main(["export", str(tmp_path / "run"), "--format", form, "--output", str(tmp_path / form)]) == 0
    trained = load_policy(tmp_path / "run/checkpoints/000001/policy").state_dict()
    start = load_published(open_published(twin), views=1, chunk_size=2, suite="libero_spatial").state_dict()
    changed = {name for name in trained if not torch.equal(trained[name], start[name])}
    assert {"lm_head.weight", "projector.fc1.weight", "language_model.layers.0.self_attn.q_proj.weight"} <= changed
    for form in ("lora", "openvla"):
        found = load_published(open_published(tmp_path / form), views=1, chunk_size=2).state_dict()
        assert [name for name in found if not torch.allclose(found[name], trained[name], atol=1e-6)] == []
    read_folder(tmp_path / "openvla")
