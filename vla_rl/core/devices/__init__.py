"""Sharing one device between processes: leases (who may compute now) and offloading (whose tensors are on it)."""
