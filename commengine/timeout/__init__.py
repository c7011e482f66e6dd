"""``Communicator(..., timeout=seconds)``: a collective that does not finish in time ends the job, with a report."""
