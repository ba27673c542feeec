"""A policy behind a network socket, for the clients of other projects."""
