"""Host tensors by MPI: the transport, polling waits, and the routes of large collectives through shared memory."""
