"""What surrounds MPI's start: the launcher's tasks, Slurm's PMI, memory that killed jobs left, the end of an orphan."""
