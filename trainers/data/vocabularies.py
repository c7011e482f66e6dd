"""The sizes of vocabularies that can be trained, and BERT's special tokens. Importing this imports no library."""

from __future__ import annotations

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLS, SEP, MASK)
#: the largest vocabulary that is trained, in tokens: the trainers take memory for all of it at once
LARGEST_VOCABULARY = 1 << 24
# The byte alphabet and the end-of-document token.
SMALLEST_BPE = 257
