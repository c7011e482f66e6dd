"""`tplayers.shard`: from a torch module on a whole field to the parallel module on blocks of it."""
