"""Making a training corpus: cleaning texts, finding near-duplicates, removing held-out text.

`pipeline` runs the stages on the ranks of a Communicator. ``filters`` and ``held_out`` look at one document at a time;
``grams``, ``candidates`` and ``duplicates`` compare documents; ``spill`` and ``exchange`` keep them on disk and move
them between ranks. The command is `trainers.prepare_corpus`.
"""
