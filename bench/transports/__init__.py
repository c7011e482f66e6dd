"""The collectives that are measured, and the ways to run them."""
