"""Floor 2: rollout engines."""
