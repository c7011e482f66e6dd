"""Transports: the ways to run a collective that bench.collectives compares.

``operations`` has the collectives, their inputs and their only right outputs. ``in_process`` has the transports that
run in the rank's own process, and their interface. ``peer_process`` runs a peer's collectives in a process beside each
rank. ``variants`` has those that answer one question each, and ``environments`` makes other libraries' environments.
"""
