"""ManiSkill 3 tasks. Nothing here is imported before a ManiSkill environment is asked for."""
