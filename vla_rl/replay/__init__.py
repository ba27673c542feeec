"""Replay: which episode is played next, where finished ones wait, and how they become super-batches."""
