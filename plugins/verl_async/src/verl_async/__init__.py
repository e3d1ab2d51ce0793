"""Fully-async RL training on top of the engine contract."""
