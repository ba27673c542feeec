"""vla_rl: asynchronous actor-learner reinforcement learning of vision-language-action (VLA) robot policies.

    EnvWorker ◀──actions──▶ InferenceServer        rollout/   env workers play episodes in simulators
        │ trajectories            ▲ weights         inference/ servers answer observations in batches
        ▼                         │                 replay/    finished episodes wait, and become super-batches
    ReplayStore ──super-batch──▶ Learner            learner/   DeepSpeed ranks update the policy

    commands/       what the command `vla-rl` does: train (the main loop), evaluate, sft, study, plan, benchmark, ...
    cluster/        starts and supervises the boxes as Ray actors; the only room that knows Ray
    placement/      decides what runs on which device, from the configuration and measured costs
    config/         the schema of a run, and reading it from YAML files and overrides
    policies/       OpenVLA-OFT: model, action codec, prompt, images, LoRA, checkpoints
    observability/  meters, rates, the terminal view, plots
    core/           records, errors, shared memory, device leases: what every room may import

Simulators are in ``envs``, algorithms in ``algos``.
"""
