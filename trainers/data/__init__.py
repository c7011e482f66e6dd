"""The data of a training run: indexed data sets, samples cut from them, tokenizers.

Nothing here communicates. Every rank reads the same files by itself, and the samples of a rank are a function of the
sample number.
"""
