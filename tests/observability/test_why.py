"""Faults are planted in the figures of recorded runs; each is named first, and the runs that learned have none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from vla_rl.commands.cli import main
from vla_rl.commands.why import last_words
from vla_rl.config.loading import dump_config
from vla_rl.config.run_config import RunConfig
from vla_rl.observability.why import CAUSES, Finding, Recorded, findings, judge, not_judged

RESULTS = ROOT / "docs/results"
CONTROL = "libero_ppo_cpu/control.jsonl"  # learning rates of zero
TOO_SHORT = "libero_spatial_cpu/control.jsonl"  # the same, of 4 updates, in which a value head could be trained first
NOT_HEALTHY = {f"libero_offpolicy/cloning-seed{n}.jsonl": "learning-rate-too-high" for n in (1, 2, 3)}
for name in ("control-seed3", *(f"original_assets-seed{n}" for n in (1, 2, 3))):
    NOT_HEALTHY[f"libero_offpolicy/{name}.jsonl"] = "data-too-stale"
NOT_HEALTHY["libero_offpolicy/cheese-pilot4.jsonl"] = "too-little-data"  # one episode in thirty succeeds
for n in (2, 3):  # while the actor falls
    NOT_HEALTHY[f"libero_offpolicy/critic_images-seed{n}.jsonl"] = "critic-expects-too-much"
# It falls to 0 %.
NOT_HEALTHY["libero_offpolicy/sac-no-cloning-seed1.jsonl"] = "critic-expects-too-much"
NOT_HEALTHY["chaos/td3_bc.jsonl"] = "value-head-explains-nothing"  # in its first 80 updates
RUNS = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.jsonl")}
PPO, GRPO = "libero_ppo_cpu/seed0_mujoco337.jsonl", "libero_grpo_cpu/grpo-seed1.jsonl"
TD3_BC = "libero_offpolicy/td3_bc-seed1.jsonl"
Value = float | Callable[[float, int], float]


def at_success(rate: float) -> dict[str, Value]:
    rollouts = ("rollout/success", "rollout/success_played", "rollout/return")
    return dict.fromkeys((*rollouts, "eval/greedy_success", "eval/sampled_success"), rate)


def planted(name: str, changes: Mapping[str, Value], config: Any = None, about: Any = None) -> Recorded:
    """The run with metrics changed where it has them, and those that it lacks added to every update."""
    run = Recorded.of(RESULTS / name)
    known = set().union(*run.metrics)

    def changed(metrics: dict[str, float]) -> dict[str, float]:
        iteration = int(metrics["iteration"])
        wanted = {key: value for key, value in changes.items() if key in metrics or (key not in known and iteration)}
        return metrics | {
            key: value(metrics.get(key, 0.0), iteration) if callable(value) else value for key, value in wanted.items()
        }

    return replace(run, metrics=[changed(m) for m in run.metrics], config=config or {}, metadata=about or {})


def faults(found: list[Finding]) -> list[str]:
    return [finding.cause for finding in found if finding.kind != "speed"]


FAULTS: list[tuple[str, str, dict[str, Value], dict[str, Any]]] = [
    ("nan-steps", PPO, {"learner/skipped_steps": lambda _, i: 4.0 * (i in (40, 41))}, {}),
    ("learning-rate-too-high", PPO, {"learner/update_kl": lambda _, i: 0.2 if 20 < i <= 32 else 0.01}, {}),
    ("learning-rate-too-high", PPO, {"learner/approx_kl": lambda old, _: 20 * old}, {}),
    ("learning-rate-too-low", PPO, {"learner/update_kl": 1e-5} | at_success(0.5), {}),
    ("learning-rate-too-low", PPO, {"learner/lr": 0.0}, {}),
    ("learning-rate-too-low", TD3_BC, {"learner/lr": 0.0}, {"algo": {"critic_warmup": 1500}}),  # steps
    (
        "kl-beyond-its-bound",
        PPO,
        {"learner/update_kl": 0.02, "learner/optimizer_steps": 1.0},
        {"algo": {"target_kl": 0.01, "epochs": 2, "minibatches": 4}},
    ),
    ("actions-saturated", PPO, {"rollout/action_saturation": 0.97} | at_success(0.1), {}),
    ("normalization-missing", PPO, {"rollout/action_middle": 0.99} | at_success(0.0), {"policy": {"checkpoint": "x"}}),
    ("success-never-true", PPO, at_success(0.0) | {"rollout/return": lambda _, i: 0.01 * i}, {}),
    (
        "time-limit-too-short",
        PPO,
        at_success(0.3) | {"rollout/episode_steps": 99.0},
        {"env": {"max_episode_steps": 100}},
    ),
    ("demonstrations-wrong", PPO, at_success(0.0), {"sft": {"demos": ["d.hdf5"]}, "policy": {"checkpoint": "x"}}),
    ("wrong-convention", PPO, at_success(0.0), {"policy": {"checkpoint": "x"}}),
    ("reward-never-seen", PPO, at_success(0.0), {"policy": {"checkpoint": None}}),
    ("all-groups-equal", GRPO, {"episodes/filtered": lambda _, i: 200.0 * i} | at_success(0.1), {}),
    ("too-little-data", PPO, {"rollout/episodes": 4.0}, {}),
    ("too-little-data", PPO, at_success(0.02), {}),
    ("too-little-data", TD3_BC, {"learner/memory_success": 0.01}, {}),
    ("entropy-collapsed", PPO, at_success(0.5) | {"learner/entropy": lambda old, i: old * math.exp(-i / 10)}, {}),
    (
        "entropy-collapsed",
        PPO,
        at_success(0.5) | {"learner/entropy": lambda _, i: 0.5 - 0.05 * i},
        {"policy": {"temperature": 0.4, "temperature_end": 0.1}},
    ),
    ("data-too-stale", PPO, {"learner/ess": 0.3}, {}),
    ("data-too-stale", PPO, {"episodes/stale": lambda _, i: 10.0 * i}, {}),
    ("value-head-explains-nothing", PPO, at_success(0.5) | {"learner/explained_variance": 0.01}, {}),
    ("critic-expects-too-much", PPO, at_success(0.1) | {"learner/critic_bias": 0.6}, {}),
]
SPEED: list[tuple[str, dict[str, Value]]] = [
    ("memory-bound", {"memory/gib": 7.5}),
    ("memory-bound", {"memory/swap_gib": 1.0}),
    ("cores-bound", {"busy/env_workers": 0.4, "busy/learner": 0.97, "machine/cpu": 0.85}),
    ("cores-bound", {"busy/env_workers": 0.98, "busy/learner": 0.9, "machine/cpu": 0.99}),
    ("simulator-bound", {"busy/env_workers": 0.98, "busy/learner": 0.9}),
    ("inference-bound", {"busy/env_workers": 0.6, "busy/inference": 0.95, "busy/learner": 0.3}),
    ("learner-bound", {"busy/env_workers": 0.6, "busy/learner": 0.95}),
    ("slow-env-worker", {"throughput/slowest_worker": 2.0}),
    ("evaluations-take-the-time", {"time/seconds": lambda old, i: old + 900.0 * (i >= 40)}),
]


@pytest.mark.parametrize(("cause", "name", "changes", "config"), FAULTS)
def test_a_planted_fault_is_named_first(cause: str, name: str, changes: dict, config: dict) -> None:
    first = judge(planted(name, changes, config))[0]
    assert first.cause == cause
    assert first.kind in ("fault", "likely")
    assert re.search(r"\d", first.evidence), "evidence has figures"
    assert first.evidence.endswith(".")


@pytest.mark.parametrize(("cause", "changes"), SPEED)
def test_what_limits_the_speed_is_no_fault(cause: str, changes: dict) -> None:
    quiet: dict[str, Value] = {"busy/learner": 0.5, "busy/env_workers": 0.5, "machine/cpu": 0.5}
    found = judge(planted(PPO, quiet | changes, about={"machine": {"memory_gib": 8.0, "gpus": []}}))
    assert [(finding.cause, finding.kind) for finding in found] == [(cause, "speed")]


def test_cores_are_no_limit_where_a_gpu_computes_or_others_use_them() -> None:
    full: dict[str, Value] = {"busy/env_workers": 0.4, "busy/learner": 0.97, "machine/cpu": 0.95}
    for about in ({"machine": {"gpus": ["NVIDIA H200"]}}, {}):
        assert [finding.cause for finding in judge(planted(PPO, full, about=about))] == ["learner-bound"]
    few = full | {"machine/cpu": 0.25, "time/iteration_s": 10.0, "time/iteration_cpu_s": 19.0}  # in a container
    about: Any = {"machine": {"gpus": [], "cores": 2}}
    (finding,) = judge(planted(PPO, few, about=about))
    assert finding.evidence.startswith("95% of the cores are in use: ")
    idle = full | {"busy/learner": 0.5, "busy/env_workers": 0.5, "busy/inference": 0.1}
    assert not judge(planted(PPO, idle, about={"machine": {"gpus": []}}))
    (finding,) = judge(planted(PPO, full, {"algo": {"updates_per_step": 0.05}}, {"machine": {"gpus": []}}))
    assert "algo.updates_per_step=0.05" in finding.remedy


def test_the_remedy_for_a_critic_is_one_of_its_own_keys() -> None:
    blind = at_success(0.3) | {"learner/explained_variance": 0.0}
    for algo, remedy in (
        ({}, "Raise learner.value_lr (recipes have 3e-3) and algo.value_warmup;"),
        (
            {"critic_lr": 1e-3, "critic_warmup": 1, "critic_steps": 200},
            "Raise algo.critic_warmup (1) and algo.critic_steps (200);",
        ),
        ({"critic_lr": 3e-4, "updates_per_step": 0.15}, "Raise algo.updates_per_step (0.15);"),
    ):
        (finding,) = [found for found in judge(planted(PPO, blind, {"algo": algo})) if found.kind == "likely"]
        assert finding.remedy.startswith(remedy)


def test_the_remedy_for_a_critic_that_expects_too_much_is_what_the_run_lacks() -> None:
    lost = at_success(0.1) | {"learner/critic_bias": 0.6}
    for config, remedy in (
        ({"algo": {"cloning": 0.0}}, "Set algo.cloning=2:"),
        ({"algo": {"cloning": 2.0}}, "else algo.critic_successes=null or a higher algo.cloning."),
        ({"algo": {"cloning": 0.0, "bootstrap": "never"}, "policy": {"steer": {}}}, "Set algo.critic_successes=null."),
    ):
        (finding,) = [found for found in judge(planted(PPO, lost, config)) if "critic_bias" in found.evidence]
        assert remedy in finding.remedy


def test_the_remedy_for_a_busy_learner_is_one_of_its_own_keys() -> None:
    """Off-policy learners have no micro-batches and no reuse."""
    busy: dict[str, Value] = {"busy/env_workers": 0.6, "busy/learner": 0.95}
    for algo, remedy in (({}, "learner.micro_batch"), ({"updates_per_step": 0.05}, "algo.updates_per_step=0.05")):
        (finding,) = judge(planted(PPO, busy, {"algo": algo}))
        assert remedy in finding.remedy
    (finding,) = judge(planted(PPO, busy | {"machine/cpu": 0.5}, about={"machine": {"gpus": []}}))
    assert "more cores" in finding.remedy
    assert "micro_batch" not in finding.remedy, "larger ones are slower there"


def test_a_clone_that_was_learned_by_heart(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"steps": 1230, "passes": 62.4, "final_loss": 0.46}))
    run = planted(PPO, at_success(0.1), {"policy": {"checkpoint": str(tmp_path)}})
    assert faults(judge(run))[0] == "overfitted-clone"
    (tmp_path / "metadata.json").write_text(json.dumps({"steps": 12300, "passes": 6.2, "final_loss": 1.9}))
    assert faults(judge(run)) == []


def test_every_cause_is_planted_and_has_its_section_in_the_same_order() -> None:
    named = [*dict.fromkeys([cause.name for cause in CAUSES])]
    assert {*(row[0] for row in FAULTS), *(row[0] for row in SPEED), "overfitted-clone"} == {*named}
    headings = re.findall(r"^## (.+)\?$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert [heading.lower().replace(" ", "-") for heading in headings] == named


@pytest.mark.parametrize("name", sorted(RUNS - {CONTROL}))
def test_recorded_runs_have_no_fault_at_any_time(name: str) -> None:
    """But for those that were unsteady, and those whose learner was slow."""
    run = Recorded.of(RESULTS / name)
    updates = [*range(1, len(run.metrics), max(3, len(run.metrics) // 15)), len(run.metrics)]
    found = {fault for n in updates for fault in faults(judge(replace(run, metrics=run.metrics[:n])))}
    assert found == ({NOT_HEALTHY[name]} if name in NOT_HEALTHY else set())


def test_a_control_does_not_learn_because_its_learning_rates_are_zero() -> None:
    first = findings(RESULTS / CONTROL)[0]
    assert (first.cause, first.kind) == ("learning-rate-too-low", "fault")
    without_warmup = replace(Recorded.of(RESULTS / TOO_SHORT), config={"algo": {"value_warmup": 0}})
    assert faults(judge(without_warmup)) == ["learning-rate-too-low"]


def test_older_figures_are_weaker_evidence_and_missing_ones_are_not_judged() -> None:
    (older,) = judge(planted(PPO, {"learner/approx_kl": 0.2, "busy/learner": 0.5, "busy/env_workers": 0.5}))
    assert older.kind == "likely"
    assert "policy that acted" in older.evidence
    chunks = planted(PPO, {"learner/approx_kl": 0.2}, {"algo": {"ratio_level": "chunk"}})
    assert faults(judge(chunks)) == [], "nats a chunk are more"
    assert not_judged(Recorded.of(RESULTS / GRPO))["value-head-explains-nothing"] == ("learner/explained_variance",)
    assert judge(Recorded([{"iteration": 0.0}])) == []


def test_the_command_reads_a_run_folder_and_says_what_the_run_ends_with(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    healthy = (RESULTS / PPO).read_text().splitlines()
    config = RunConfig.model_validate({"env": {"name": "tabletop"}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "metrics.jsonl").write_text("\n".join(healthy) + "\n" + healthy[-1][:50])  # cut off: under way
    output = tmp_path / "why.json"
    assert main(["why", str(tmp_path), "--json", str(output)]) == 0
    assert "80 updates, success 96%" in (text := capsys.readouterr().out)
    assert "Nothing that is known looks wrong" in text
    assert "actions-saturated: rollout/action_saturation" in text
    assert {finding["kind"] for finding in json.loads(output.read_text())["findings"]} == {"speed"}
    failing = [json.dumps(m) for m in planted(PPO, at_success(0.0)).metrics]
    (tmp_path / "metrics.jsonl").write_text("\n".join(failing) + "\n")
    assert main(["why", str(tmp_path)]) == 1
    assert "1. No episode has had a reward. All of 2020 episodes returned 0" in capsys.readouterr().out
    words = [*last_words(tmp_path)]
    assert words[0].startswith("why: No episode has had a reward.")
    assert words[1].endswith("(docs/troubleshooting.md#reward-never-seen)")
    assert len(words) <= 6
    (tmp_path / "config.yaml").write_text("policy: [")
    assert findings(tmp_path)[0].cause == "reward-never-seen", "a damaged config is as none"
