"""What the command `vla-rl` does: one file per command, what a run writes, and the command line itself (``cli``)."""
