"""LIBERO's tasks in robosuite: a fast implementation, and hf-libero's own as the reference."""
