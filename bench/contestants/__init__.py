"""Our side of the contests."""
