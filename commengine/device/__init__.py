"""Device tensors: by NCCL through CuPy's binding on CUDA streams, or by MPI through the host."""
