"""A fake of Ascend's FSDP-Turbo: its names, what it refuses, and what it gets wrong silently.

Written from a description of the library's behaviour, not from its source. Sharding is PyTorch's own, so what comes of
it is real on a CPU. ``FAKE_FSDP_TURBO_HAS`` says which release it plays; see `release`.
"""
