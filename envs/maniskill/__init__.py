"""ManiSkill 3 tasks. Nothing of ManiSkill is imported before one of its environments is made."""
