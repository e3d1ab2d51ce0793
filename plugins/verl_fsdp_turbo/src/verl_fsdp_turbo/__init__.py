"""Engine backend on Ascend's FSDP-Turbo library."""
