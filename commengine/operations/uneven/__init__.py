"""The operations in which each rank gives another number of rows."""
