"""Which modules are gathered and freed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from verl_fsdp.config import ShardedConfig


def blocks(model: PreTrainedModel, config: ShardedConfig) -> list[torch.nn.Module]:
    """Return the modules of the classes in ``wrap``, or those that the model's authors say must stay whole.

    Raises:
        ModelError: the model has none.
    """
    del config
    names = set(cast("Any", model)._no_split_modules or ())  # noqa: SLF001 - transformers' own convention
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ModelError(
            f"{type(model).__name__} names no block to shard (_no_split_modules={sorted(names)}); fsdp2 needs a model "
            "that does"
        )
    return found
