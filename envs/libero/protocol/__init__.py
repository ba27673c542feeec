"""What defines a LIBERO episode: tasks, initial states, and the conventions of actions and proprioception."""
