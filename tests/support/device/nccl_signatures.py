"""The signatures of CuPy's NCCL binding: the first lines of its docstrings, of versions 13.6 and 14.2.

`tests/commengine/device/test_nccl_binding.py` compares them with the real binding wherever it loads.
`nccl_stand_in.py` checks every call against them.
"""

_BOTH = {
    "get_build_version": "get_build_version()",
    "get_unique_id": "get_unique_id()",
    "get_version": "get_version()",
    "groupEnd": "groupEnd()",
    "groupStart": "groupStart()",
    "NcclCommunicator.abort": "NcclCommunicator.abort(self)",
    "NcclCommunicator.allGather": "NcclCommunicator.allGather(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, "
    "int datatype, intptr_t stream)",
    "NcclCommunicator.allReduce": "NcclCommunicator.allReduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, "
    "int datatype, int op, intptr_t stream)",
    "NcclCommunicator.bcast": "NcclCommunicator.bcast(self, intptr_t buff, size_t count, int datatype, int root, "
    "intptr_t stream)",
    "NcclCommunicator.broadcast": "NcclCommunicator.broadcast(self, intptr_t sendbuff, intptr_t recvbuff, "
    "size_t count, int datatype, int root, intptr_t stream)",
    "NcclCommunicator.check_async_error": "NcclCommunicator.check_async_error(self)",
    "NcclCommunicator.destroy": "NcclCommunicator.destroy(self)",
    "NcclCommunicator.device_id": "NcclCommunicator.device_id(self)",
    "NcclCommunicator.rank_id": "NcclCommunicator.rank_id(self)",
    "NcclCommunicator.recv": "NcclCommunicator.recv(self, intptr_t recvbuf, size_t count, int datatype, int peer, "
    "intptr_t stream)",
    "NcclCommunicator.reduce": "NcclCommunicator.reduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, "
    "int datatype, int op, int root, intptr_t stream)",
    "NcclCommunicator.reduceScatter": "NcclCommunicator.reduceScatter(self, intptr_t sendbuf, intptr_t recvbuf, "
    "size_t recvcount, int datatype, int op, intptr_t stream)",
    "NcclCommunicator.send": "NcclCommunicator.send(self, intptr_t sendbuf, size_t count, int datatype, int peer, "
    "intptr_t stream)",
    "NcclCommunicator.size": "NcclCommunicator.size(self)",
}

#: by CuPy's major version
SIGNATURES = {
    13: _BOTH | {"NcclCommunicator": "NcclCommunicator(int ndev, tuple commId, int rank)"},
    14: _BOTH
    | {
        "NcclCommunicator": "NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)",
        "NcclCommunicator.commSplit": "NcclCommunicator.commSplit(self, int color, int key, NcclConfig config=None)",
    },
}

CONSTANTS = {
    "NCCL_INT8": 0, "NCCL_UINT8": 1, "NCCL_INT32": 2, "NCCL_UINT32": 3, "NCCL_INT64": 4, "NCCL_UINT64": 5,
    "NCCL_FLOAT16": 6, "NCCL_FLOAT32": 7, "NCCL_FLOAT64": 8, "NCCL_BFLOAT16": 9,
    "NCCL_SUM": 0, "NCCL_PROD": 1, "NCCL_MAX": 2, "NCCL_MIN": 3, "NCCL_AVG": 4,
}  # fmt: skip
