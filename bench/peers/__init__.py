"""Peers: programs of other libraries that this one is measured against, on torch.distributed.

No other folder imports torch.distributed. ``collectives`` runs beside each rank of bench.collectives; ``gpt``, ``ddp``
and ``dtensor`` are contestants of bench.step_contest, and ``all_reduce`` is one of ``bench.gpu overhead``.
"""
