"""Snapshots of weights on the CPU, at the speed of memory."""
