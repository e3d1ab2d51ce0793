"""From gradients to new weights."""
