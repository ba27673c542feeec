"""Inference: servers collect observations into dynamic batches and answer them with a policy."""
