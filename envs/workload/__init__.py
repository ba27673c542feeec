"""A simulator that computes nothing: episodes of known length and cost."""
