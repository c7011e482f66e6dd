"""What commengine raises."""


class CollectiveError(RuntimeError):
    """A collective was asked for something that it cannot do, or failed while doing it.

    The message names the rank, the group and the operation. Raised before anything is sent wherever the cause
    can be seen on this rank alone: shape, dtype, device, layout, root, reduction.
    """


class CollectiveMismatch(CollectiveError):
    """The ranks of a group asked for different collectives (``Communicator(..., checked=True)`` only).

    Raised on every rank of the group; the message lists which rank asked for what.
    """


class CollectiveTimeout(CollectiveError):
    """A collective did not finish within the time it was given."""


class LaunchError(RuntimeError):
    """The launcher and MPI disagree about how many processes there are."""


class UsageError(Exception):
    """Bad input that every rank knows of: rank 0 prints the message, all ranks exit with code 2."""
