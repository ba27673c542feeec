"""Meta-World's tasks. Nothing of Meta-World is imported before one of its environments is made."""
