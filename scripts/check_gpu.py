#!/usr/bin/env python
"""Finds out, in thirteen steps, what this project does on a machine with a GPU.

    python scripts/check_gpu.py --json FILE [--steps 1,2,3] [--limit SECONDS] [--small] [--output PICTURE]

Each step runs in a process of its own with a time limit. A result is printed as soon as it is known, FILE is written
after each step, and a step that fails does not end the rest. Steps 1 to 7 need neither Ray nor a simulator; a step
whose packages are absent is skipped. Without a GPU, small shapes run on the processor: that checks the code alone; so
does --small on a GPU, in two minutes. With --steps "" nothing runs, and what FILE has is drawn.
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore", category=FutureWarning)

from gpu_checks import drawing, inference, memory, off_policy, policies, runs, simulators, training  # noqa: E402
from gpu_checks.report import Step, run_steps  # noqa: E402
from gpu_checks.setting import choose_setting  # noqa: E402

STEPS = (
    Step(1, "tiny policy: act, update, weight sync; log-probabilities", inference.same_numbers, 180, ["deepspeed"]),
    Step(2, "a policy of random weights, filled on the device", inference.fill, 120),
    Step(3, "act by number of rows: eager, CUDA graphs, compiled, with adapters", inference.act, 420),
    Step(4, "LoRA micro-batches, with and without activation checkpointing", training.micro_batches, 300),
    Step(5, "a LoRA update from end to end", training.update, 240, ["deepspeed", "peft"]),
    Step(6, "hand-over of weights, and lending frozen ones", memory.hand_over, 240, ["peft"]),
    Step(7, "offload and onload, to the bit", memory.offload, 240, ["deepspeed", "peft"]),
    Step(8, "LIBERO: frames by number of workers, while the GPU trains", simulators.libero, 300, ["mujoco", "libero"]),
    Step(9, "ManiSkill: steps and frames by number of rows, partial resets", simulators.maniskill, 300, ["mani_skill"]),
    Step(10, "vla-rl train, by placement", runs.train, 600, ["ray", "deepspeed"]),
    Step(11, "vla-rl train, a large policy with LoRA on LIBERO", runs.train_large, 600, ["ray", "deepspeed", "libero"]),
    Step(12, "OpenVLA, a continuous head, and π0: act, learn, log-probabilities", policies.other_policies, 240),
    Step(
        13, "td3_bc, a continuous head: memory and time of an update", off_policy.off_policy, 240, ["deepspeed", "peft"]
    ),
)


def main() -> int:
    """Returns 1 if a step failed or ran out of time, else 0."""
    parser = argparse.ArgumentParser(description="What this project does on a machine with a GPU.")
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--steps", default=",".join(str(step.number) for step in STEPS), help="such as 1,2,7")
    parser.add_argument("--limit", type=float, help="seconds of each step, instead of its own limit")
    parser.add_argument("--small", action="store_true", help="small shapes also on a GPU")
    parser.add_argument("--output", type=Path, help="draw steps 3 and 4, a png file")
    args = parser.parse_args()
    wanted = {int(number) for number in args.steps.split(",") if number}
    steps = [step for step in STEPS if step.number in wanted]
    if args.limit is not None:
        steps = [replace(step, limit_s=args.limit) for step in steps]
    setting = choose_setting(args.small)
    small = "no GPU that torch can use: small shapes on the processor"
    print(f"on {setting.device}, policy {setting.size}" if setting.on_gpu else small)
    results = run_steps(steps, setting, args.json)
    if args.output:
        drawing.draw(json.loads(args.json.read_text()), args.output)
    return int(any(result["state"].startswith(("failed", "stopped")) for result in results))


if __name__ == "__main__":
    sys.exit(main())
