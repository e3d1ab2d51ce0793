"""From a model folder to a model in memory, ready to be sharded."""
