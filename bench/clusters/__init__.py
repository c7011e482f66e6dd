"""Machines, described in YAML with sources."""
