"""Layer 1: what an engine is and does. Nothing here imports torch."""
