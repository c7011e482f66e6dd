"""The start of MPI: the launcher's tasks, Slurm's PMI, memory that killed jobs left, the end of an orphan."""
