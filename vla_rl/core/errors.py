"""The error that a user can fix: commands print its text without a traceback and exit with status 2."""


class UserError(ValueError):
    """Something outside this program's code is wrong. The text names the value found, the place and the remedy."""
