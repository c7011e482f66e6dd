"""A training step, recorded and taken apart.

A *part* of a step is the embedding, a layer, the output layer, the loss, or what stands outside of the model; a part
of the model is in a *phase*: forward, recompute or backward. A *span* is a stretch of the caller's time in one part
and phase (``spans``). ``traced_step`` traces steps and finds for each collective its part, its skew and the time that
was exposed. ``volumes`` compares the collectives with the formulas; ``step_tables`` and ``timeline`` show them.

A *recording* is the trace of one step, a file for each rank: ``recorder`` prepares it, ``recording`` reads it, and
``replaying`` runs its collectives again.
"""
