"""The backend fsdp: PyTorch's ``FullyShardedDataParallel`` (FSDP1)."""
