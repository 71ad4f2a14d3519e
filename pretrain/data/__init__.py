"""From shards to packed batches: row order, packing, and the tensors of an update."""
