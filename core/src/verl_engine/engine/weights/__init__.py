"""Weights in and out: full, in buckets, or in each rank's shards."""
