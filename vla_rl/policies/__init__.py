"""Vision-language-action policies. ``vla_rl.policies.build`` makes one from a run's config."""
