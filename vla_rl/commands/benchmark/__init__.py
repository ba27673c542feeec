"""Benchmarks: each compares in one run, names the machine and can write its figures as JSON."""
