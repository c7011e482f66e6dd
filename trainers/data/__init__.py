"""What a training run reads: indexed data sets, samples cut from them, tokenizers.

Nothing here imports MPI or ``commengine``: every rank reads the same files by itself, and which samples
are its own is a function of the sample number.
"""
