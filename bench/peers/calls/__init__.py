"""Programs that make single collectives for bench/transports/peer_process.py, in a process beside each rank.

``obeying`` has the commands that all of them obey. ``collectives`` is torch.distributed, ``another_mpi`` the transports
of bench.collectives over another MPI, ``deepspeed_shm`` DeepSpeed's all-reduce, and ``compiled`` runs the two loops
``oneccl.cpp`` and ``c_loop.c``.
"""
