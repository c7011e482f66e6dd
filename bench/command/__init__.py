"""What the command lines of all studies share."""
