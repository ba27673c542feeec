"""Policies of the package lerobot, for evaluation."""
