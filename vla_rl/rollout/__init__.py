"""Rollout: env workers play episodes in vectorized simulators and record trajectories."""
