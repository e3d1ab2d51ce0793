"""How Megatron-core, which is written for CUDA, runs on a CPU: what is patched, each with its reason, and by what.

Nothing of this is installed where the device is another one. Torch itself stays as it is, and so does all other code of
the process: only Megatron's own modules are changed, each right after its import.
"""
