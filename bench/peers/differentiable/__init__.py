"""Operators for ``python -m bench.conformance adjoints``: of torch.distributed on gloo, and of mpi4torch."""
