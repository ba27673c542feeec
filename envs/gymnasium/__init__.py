"""Environments of gymnasium, from any package, behind the ``VectorEnv`` interface."""
