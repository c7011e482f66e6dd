"""Programs that do the same work and alternate within one run."""
