"""The names of what bench.collectives measures, and by what. Importing this imports no torch."""

from __future__ import annotations

#: in the order of their numbers in bench/peers/calls/c_loop.c and oneccl.cpp
OPERATIONS = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "sendrecv",
    "barrier", "send", "all_to_all_v", "all_gather_v",
)  # fmt: skip
REDOPS = ("sum", "prod", "min", "max", "avg")
#: the kinds of buffers: see bench/transports/in_process.py. A row that says none has the first
BUFFERS = SAME, FRESH, NEW = ("same", "fresh", "new")
#: torch's
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8")
#: `bench.transports.variants.TRANSPORTS`, and after them `bench.transports.peer_process.PEERS`
TRANSPORTS = (
    "engine", "mpi4py", "shared", "stream", "nccl", "staged", "beside-windows", "mpix-bfloat16", "in-fp32", "memory",
    "prepared", "under-all-reduce", "gloo", "torch-nccl", "openmpi", "engine@openmpi", "shared@openmpi", "intel",
    "engine@intel", "shared@intel", "oneccl", "deepspeed", "c-loop",
)  # fmt: skip
