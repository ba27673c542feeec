"""Sizes of the patches of ``vla_rl.policies.base.cameras``. Importing this file does not load torch."""

PATCH = 8  # pixels
STRIDE = 2 * PATCH  # what image sizes are multiples of
