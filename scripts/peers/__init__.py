"""One file for each library that ``scripts/benchmark_peers.py`` compares with: it trains, and prints a line of JSON."""
