"""Layer 3: the queue, staleness, weight sync and the two loops, in plain asyncio."""
