"""The checks of `bench.doctor`: facts about each rank's place, rules on how they fit, and a test of each transport.

``facts`` reads what one rank sees, ``self_test`` runs each transport and checks its results, ``findings`` says what
does not fit and what to change, and ``page`` writes it all on one page.
"""
