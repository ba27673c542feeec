"""The simulators of this project as environments of gymnasium: ``gymnasium.make("vla_rl/Tabletop-v0")``."""
