"""Layer 4: the Engine base class, the training step, weight buckets, and one rank's engine behind plain methods."""
