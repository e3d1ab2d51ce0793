"""Megatron-core as a training engine: the backend ``megatron``; on Ascend NPUs MindSpeed patches it first.

Only the modules that `build` imports, which `hooks` imports when an engine is created, import Megatron at their top.
"""
