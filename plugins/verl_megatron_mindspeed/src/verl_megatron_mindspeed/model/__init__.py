"""Megatron's model of a Hugging Face folder: how it is described, built and split."""
