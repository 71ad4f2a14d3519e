"""Fine-tuning on transformers' Trainer, and BLiMP by pseudo-log-likelihood."""
