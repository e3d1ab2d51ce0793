"""MindSpeed on Ascend NPUs: applied before Megatron is imported, wholly, or the process is refused; see `adaptor`.

It replaces about a hundred names of torch and Megatron when it is imported, and again, by other arguments, in its
`repatch`. Nothing here imports Megatron, MindSpeed does.
"""
