"""Checkpoints to Hugging Face folders and back; Google, NVIDIA and Megatron layouts in."""
