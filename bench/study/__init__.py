"""A study of the machine at hand in one command: collectives, fits, a training step, its replay, and a page.

``__main__`` is the command; ``folder`` keeps what is finished; ``sizes`` measures the collectives, coarse sizes first;
``answers`` writes the page's first screen, and ``projection`` the costs on ranks that are not there.
"""
