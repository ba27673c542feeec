"""What runs inside the processes of a cluster: each class builds one component there and forwards a handful of calls.

Imports of torch, simulators and algorithms wait until a process needs them.
"""
