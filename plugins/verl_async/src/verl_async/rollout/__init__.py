"""Layer 2: rollout engines."""
