"""MPI, for host tensors: the transport, and the routes that large collectives take."""
