"""How a call is timed.

``sampling`` decides how often, ``clocks`` compares the clocks of the ranks, ``starting`` lets the ranks begin a call
together, and ``slow_link`` makes a group's transport as slow as a network.
"""
