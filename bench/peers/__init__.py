"""Peers: programs of other libraries that this one is measured against, on torch.distributed.

No other folder imports torch.distributed. ``collectives`` runs beside each rank of bench.collectives; ``plain``,
``ddp`` and ``dtensor`` are contestants of ``bench.contest step``, and ``all_reduce`` is one of ``bench.gpu overhead``.
"""
