"""Weights under Hugging Face names: where each of them lies in Megatron's parameters, and all ways in and out."""
