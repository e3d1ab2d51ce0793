"""The backend fsdp2: PyTorch's ``fully_shard``."""
