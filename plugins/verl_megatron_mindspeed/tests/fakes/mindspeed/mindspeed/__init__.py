"""Patches Megatron for NPUs."""
