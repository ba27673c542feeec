"""The arrows between the boxes on one node: shared memory, observations and answers, weight sync.

Bulk data never passes through Ray: it is written once into shared memory, and a doorbell wakes the reader.
"""
