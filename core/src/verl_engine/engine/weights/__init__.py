"""Weights on their way in and out: whole, in buckets, or in each rank's shards."""
