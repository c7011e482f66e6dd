"""The exceptions that commengine raises."""


class CollectiveError(RuntimeError):
    """A collective was asked for something that it cannot do, or it failed.

    The message names the rank, the group and the operation. Shape, dtype, device, layout, root and reduction are
    checked on each rank by itself, and the error is raised before anything is sent.
    """


class CollectiveMismatch(CollectiveError):
    """The ranks of a group asked for different collectives.

    What the ranks make together (a Communicator, its parts, its streams, shared memory) is always compared. With
    ``Communicator(..., checked=True)`` every collective is compared, too, on all ranks of the group. Without it, only
    large host collectives are compared: those that go through a node's shared memory, and, once a group has tensors
    from `Communicator.empty`, those that are large enough to go there. These compare the ranks of one node.

    Raised on every rank that took part in the comparison; the message lists which rank asked for what. A collective
    that was not compared raises it on a rank where MPI tells that the sizes differ.
    """


class CollectiveTimeout(CollectiveError):
    """A collective did not finish within the communicator's ``timeout``."""


class TransferError(Exception):
    """A transport could not move a tensor: a message had another length than expected, or NCCL refused the call.

    Internal: the Communicator turns it into a `CollectiveError` that names the rank, the group and the operation.
    """


class LaunchError(RuntimeError):
    """The launcher and MPI disagree about the number of processes."""


class UsageError(Exception):
    """Bad input that every rank knows about: rank 0 prints the message, and all ranks exit with code 2."""


def one_line(problem: object, most: int = 2000) -> str:
    """The message of an error in one line of at most about ``most`` characters: the middle of a longer one is left out.

    A message repeats what a user gave, which may be a file of megabytes.
    """
    text = str(problem)
    if len(text) > most:
        text = f"{text[: most * 3 // 4]} ... ({len(text) - most} more characters) ... {text[-most // 4 :]}"
    return " ".join(text.split())
