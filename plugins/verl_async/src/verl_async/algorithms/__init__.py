"""Floor 1: advantages and losses, as pure functions."""
