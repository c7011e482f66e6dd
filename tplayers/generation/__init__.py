"""Text from a model: the loop over its tokens, and the choice of the next one from shards of the vocabulary."""
