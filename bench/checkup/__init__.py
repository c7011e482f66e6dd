"""What a job has to run on, rank by rank, whether it fits together, and whether every transport works.

``facts`` reads what one rank sees, ``self_test`` runs each transport and checks its results, ``findings`` says what
does not fit and what to change, and ``page`` writes it all on one page.
"""
