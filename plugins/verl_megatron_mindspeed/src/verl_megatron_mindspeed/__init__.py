"""Megatron-core as a training engine: the backend ``megatron``; on Ascend NPUs MindSpeed patches it first.

Nothing in this package imports Megatron at its top level, but for the modules that `engine` imports: see `hooks`.
"""
