"""PyTorch FSDP engine backends."""
