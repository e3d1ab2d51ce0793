"""Layers of the NPU."""
