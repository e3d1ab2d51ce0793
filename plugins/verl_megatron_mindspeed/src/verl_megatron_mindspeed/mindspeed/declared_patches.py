"""What preparation declares to the host on an NPU. MindSpeed says itself what else it replaces, once it has."""

from typing import Final

from verl_engine.contract.backend import DeclaredPatch

PATCHES: Final = (
    DeclaredPatch(
        "megatron.core.transformer.transformer_config:TransformerConfig.__init__",
        "MindSpeed's layers look for its own arguments in Megatron's config",
        kept_by=("mindspeed", "megatron_adaptor"),
    ),
)
