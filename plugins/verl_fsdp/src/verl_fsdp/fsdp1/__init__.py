"""The backend fsdp: PyTorch's ``FullyShardedDataParallel``."""
