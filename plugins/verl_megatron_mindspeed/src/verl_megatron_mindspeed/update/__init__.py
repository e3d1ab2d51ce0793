"""Gradients, the optimizer, checkpoints and offload of a Megatron model."""
