"""Layer 1: advantages, losses and what goes into them, as pure functions. Free of torch at import."""
