"""A fast tabletop simulator in numpy: physics, tasks and drawing."""
