"""What blocks are told before they are sharded: torch.compile, and transformers' activation checkpointing."""

import torch
from transformers import AttentionInterface, PreTrainedModel

from verl_engine.contract.errors import ConfigError, ModelError, UnsupportedError
from verl_fsdp.config import TorchSharding
from verl_fsdp.forward.attention import PACKED_ATTENTION, packed_attention

_backends_used: set[str] = set()
"""Of torch.compile, by all engines of this process."""


def compile_block(block: torch.nn.Module, config: TorchSharding) -> None:
    """Compile a block in place, before it is sharded; its weights keep their names. No effect unless configured.

    Raises:
        ConfigError: torch has no such backend.
        UnsupportedError: an engine of this process was compiled by another backend.
    """
    if not config.compile:
        return
    others = _backends_used - {config.compile_backend}
    if others:
        # torch keeps graphs by code, not by engine; a checkpoint's recomputation may take the other backend's.
        raise UnsupportedError(
            f"engine.compile_backend={config.compile_backend}: an engine of this process was compiled with "
            f"{', '.join(others)}, and torch mixes up their graphs; use one for both"
        )
    # Where sequences lie differs from one micro-batch to the next: a graph with attention in it would be compiled anew
    # for each, and after eight of them torch gives up and runs uncompiled.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    # The number of tokens differs too. By default torch finds that out by a first graph for one number only; where both
    # fit, a checkpoint's recomputation may take the other one than the forward, and fails.
    try:
        block.compile(backend=config.compile_backend, dynamic=True)
    except torch._dynamo.exc.InvalidBackend as error:  # noqa: SLF001 - torch has no public name for it
        raise ConfigError(
            f"engine.compile_backend={config.compile_backend} is none of torch.compile's backends; use one of "
            f"{', '.join(torch.compiler.list_backends())}"
        ) from error
    _backends_used.add(config.compile_backend)


def enable_recompute(model: PreTrainedModel, config: TorchSharding) -> None:
    """Let each block of a model, before it is sharded, keep its input only, and compute the rest again in the backward.

    No effect unless configured; ModelError where the model does not support it.
    """
    if not config.activation_checkpointing:
        return
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"engine.activation_checkpointing=true: {type(model).__name__} does not support it; set it to false"
        )
    # In train mode only, says transformers' own layer. Reentrant checkpoints would lose gradients of frozen inputs.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
