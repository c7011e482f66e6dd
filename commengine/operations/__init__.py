"""The operations of a Communicator, a file each: the public call, its checks, and its ways to the wire.

| part of an operation's file            | says                                                                     |
|----------------------------------------|--------------------------------------------------------------------------|
| the class of its row (`Operation`)     | its name, arguments, size and formula, from which the project's tables come |
| `by_mpi`                               | how MPI moves host tensors                                               |
| `in_window`, `in_slots`                | how the ranks of a node do, in shared memory                             |
| `in_two_levels`                        | how a group that spans nodes reduces                                     |
| `in_node`                              | of operations with numbers of rows: how the ranks of a node do           |
| `by_nccl`                              | how NCCL moves device tensors                                            |
| the class with the public method       | its arguments, its checks, and the call                                  |

`commengine.calls.routes` decides which of the ways a call on host tensors takes.
"""

from commengine.shared_memory.flags import IN_MEMORY as IN_MEMORY
from commengine.shared_memory.flags import REDUCING_IN_MEMORY as REDUCING_IN_MEMORY

from .all_gather import ALL_GATHER, AllGatherCall
from .all_reduce import ALL_REDUCE, AllReduceCall
from .all_to_all import ALL_TO_ALL, AllToAllCall
from .barrier import BARRIER, BarrierCall
from .broadcast import BROADCAST, BroadcastCall
from .exchange import ExchangeCall
from .gather import GATHER, GatherCall
from .messages import RECV, SEND, SENDRECV, MessageCalls
from .operation import Operation
from .reduce import REDUCE, ReduceCall
from .reduce_scatter import REDUCE_SCATTER, ReduceScatterCall
from .scatter import SCATTER, ScatterCall
from .uneven.all_gather_v import ALL_GATHER_V, AllGatherVCall
from .uneven.all_to_all_v import ALL_TO_ALL_V, AllToAllVCall

_ALL: tuple[Operation, ...] = (
    ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, ALL_TO_ALL_V,
    ALL_GATHER_V, BARRIER, SEND, RECV, SENDRECV,
)  # fmt: skip

#: all operations by name
OPERATIONS = {operation.name: operation for operation in _ALL}


class OperationCalls(
    AllReduceCall, ReduceCall, ReduceScatterCall, AllGatherCall, BroadcastCall, GatherCall, ScatterCall, AllToAllCall,
    AllToAllVCall, AllGatherVCall, BarrierCall, MessageCalls, ExchangeCall,
):  # fmt: skip
    """The public calls of all operations."""
