"""Shards to a trained BERT: model, exact LAMB, packed batches, checkpoints, HF conversion."""
