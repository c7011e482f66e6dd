"""How a call is timed: how often, on which clock, and how the ranks begin together."""
