"""Does communication keep its promises? ``bits``: of its sums. ``adjoints``: of its gradients."""

#: the parts of ``python -m bench.conformance``, each with a line about it
PARTS = {
    "bits": "what the bits of a sum depend on: the message's size, its place, its ranks, or nothing",
    "adjoints": "whether operators that communicate have the derivatives of their serial definitions",
}
