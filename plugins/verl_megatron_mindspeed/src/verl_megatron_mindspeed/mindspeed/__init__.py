"""MindSpeed on Ascend NPUs: applied before Megatron is imported, wholly, or the process is refused.

MindSpeed replaces about a hundred names of torch and Megatron when its adaptor is imported, and again, by other
arguments, in `repatch`. `adaptor` does both; `repatch_keys` derives the arguments from the ``engine`` section;
`patches` reads what MindSpeed says it did, and `post_check` whether it is so. Nothing here imports Megatron, MindSpeed
does.
"""
