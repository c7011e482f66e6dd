"""Computing the same bits at every tensor-parallel size, with and without sequence parallelism.

The idea is to compute at every size as the largest size would. A layer that is split over the tensor group is cut into
C *canonical shards*, and each rank of a group of P has C / P of them, side by side.

- A product is computed once for each shard, in the shape that a rank of a group of C would have (`products`).
- A sum over shards is taken in one binary tree over the C partial results. A rank adds up its own shards, which are a
  subtree, and the collectives of the group go on with the ranks (`Communicator` with ``order="tree"``).
- An activation that is split has the rank's shards as its first dimension: [C / P, s, b, n / C]. So every shard is
  contiguous, as it would be on a rank of its own.
- A sum over tokens is taken in blocks of rows, because with sequence parallelism each rank has some of the rows
  (`shards`, `norms`).
- Functions of single elements see whole vectors only, because the last elements of a tensor take other instructions
  (`pointwise`).

`tplayers.use_canonical_shards` makes the layers of a model compute in this way: it gives each the class of `layers`
that computes so. The layers themselves know nothing of it.
"""
