"""Activation checkpointing by transformers' own means."""

from transformers import PreTrainedModel

from verl_engine.contract.errors import ModelError
from verl_fsdp.config import TorchSharding


def enable_recompute(model: PreTrainedModel, config: TorchSharding) -> None:
    """Let each block keep its input only, and compute the rest again in the backward. No effect unless configured.

    Args:
        model: not sharded yet.
        config: of the engine.
    Raises:
        ModelError: the model does not support it.
    """
    if not config.activation_checkpointing:
        return
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"engine.activation_checkpointing=true: {type(model).__name__} does not support it; set it to false"
        )
    # In train mode only, says transformers' own layer. Reentrant checkpoints would lose gradients of frozen inputs.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
