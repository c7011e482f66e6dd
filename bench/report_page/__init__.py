"""The page of bench.report: results as HTML that stands alone.

``markdown`` reads the subset of markdown in which results are written; ``tables`` makes tables that fold and that a
click on a heading sorts; ``units`` gives the columns of JSON their units; ``measured`` shows the kinds of JSON that the
commands write; ``page`` puts a folder together.
"""
