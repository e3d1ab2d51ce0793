"""All of a run's state in folders: written in the background, whole or not at all, read on any number of ranks."""
