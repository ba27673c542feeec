"""Policies that another process serves, for evaluation."""
