"""Layer 1: prompts, examples, their order, their tokens, and rewards."""
