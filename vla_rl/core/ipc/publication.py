"""Numbers of publications: what servers tell newer weights by.

They rise from one publication to the next. Of a policy version, first the average of its weights may be published, for
an evaluation, and then the weights themselves. Whatever is acted with, chunks carry the policy version.
"""


def publication(policy_version: int, *, average: bool = False) -> int:
    """Of the weights of a policy version, or of their average."""
    return 2 * policy_version + (not average)


def policy_version_of(number: int) -> int:
    """Of a publication; -1 before the first."""
    return number // 2
