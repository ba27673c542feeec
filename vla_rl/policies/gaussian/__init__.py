"""A small policy with a Gaussian over action chunks: the cheapest actor."""
