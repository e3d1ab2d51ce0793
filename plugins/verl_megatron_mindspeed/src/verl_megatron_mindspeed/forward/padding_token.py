"""The embedding of the padding token is not trained, as in transformers.

There it is a row of zeros that never changes, if the model's config names such a token. Megatron knows none, and in a
row of zeros a norm's gradient is enormous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from verl_megatron_mindspeed.parallel import Group


def exclude_padding_token(embedding: Any, token: int | None, num_tokens: int, tensor_group: Group) -> None:
    """Stop gradients where the padding token is looked up. A tied output layer trains it on, as in transformers.

    The token is counted from the end where it is negative, and None where there is none. Tensor-parallel ranks may have
    a part each of what is looked up.
    """
    if token is None:
        return
    row = token % num_tokens

    def stop(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not output.requires_grad:
            return
        is_padding = (arguments[0] == row).unsqueeze(-1)  # [1, t, 1]
        if embedding.reduce_scatter_embeddings:
            is_padding = is_padding.transpose(0, 1).chunk(tensor_group.size)[tensor_group.rank]
        output.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))

    embedding.register_forward_hook(stop)
