"""Runs that have the same bits at every layout: what they cost, and whether they have."""
