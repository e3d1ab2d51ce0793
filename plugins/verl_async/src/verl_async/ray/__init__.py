"""Layer 4: actors around trainer ranks and rollout engines. The only files that import ray."""
