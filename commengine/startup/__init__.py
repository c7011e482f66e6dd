"""What surrounds MPI's start: the launcher's tasks, memory that killed jobs left, the end of an orphan."""
