"""Inference over the network: env workers on nodes without an inference server ask one elsewhere.

    env workers ──rows──▶ Relay ──messages──▶ Gateway ──rows──▶ InferenceServer
    (one node)  ◀──rows── Relay ◀──messages── Gateway ◀──rows── (another node)

Workers and server know nothing of this: each side has a pool of rows in its own shared memory. The relay plays the
server's part in one, the gateway the workers' part in the other.
"""
