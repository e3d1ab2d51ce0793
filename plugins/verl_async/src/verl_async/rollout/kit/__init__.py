"""The kit that proves a rollout engine: ``verl-engine check NAME --kind rollout``."""
