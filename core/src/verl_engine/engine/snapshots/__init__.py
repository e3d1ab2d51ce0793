"""Weights kept aside on the CPU, at the speed of memory."""
