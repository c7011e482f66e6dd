"""A tokenizer with all that stands beside it, read as ``AutoTokenizer`` of transformers reads a folder.

transformers itself is not asked, because a result must not depend on whether it is installed, nor on its version. The
classes of the models that are here are built as version 5 builds them; any other is refused by its name.
"""
