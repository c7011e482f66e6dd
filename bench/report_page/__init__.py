"""The page of `bench.study --only report`: results as HTML that stands alone.

``rendering`` makes HTML of markdown, ``records`` tables of JSON, and ``page`` puts a folder together.
"""
