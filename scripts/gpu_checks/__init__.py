"""The steps of ``scripts/check_gpu.py``: what to find out on a machine with a GPU, in this order."""
