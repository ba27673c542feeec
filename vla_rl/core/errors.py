"""Errors that commands report as one message, without a traceback, and that callers tell apart."""


class UserError(ValueError):
    """Something outside this program's code is wrong: exit status 2. The text names the value found, the place and the
    remedy."""


class RunError(RuntimeError):
    """A run cannot go on: exit status 1. The text names the first cause, where its evidence is, and what to do."""


class RecoverableError(RunError):
    """Processes have died, failed or hang; the run can go on from its newest checkpoint."""


class StallError(RecoverableError, TimeoutError):
    """Nothing has happened for longer than it may take."""


class NotFiniteError(ValueError):
    """Numbers of a simulator, or data for training, hold a NaN or an infinity."""
