"""Machines for bench.predict, one YAML file each, and their reader."""
