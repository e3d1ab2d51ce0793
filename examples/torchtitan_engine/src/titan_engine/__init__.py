"""The engine ``titan_engine``: Qwen3 of torchtitan, sharded over all ranks."""
