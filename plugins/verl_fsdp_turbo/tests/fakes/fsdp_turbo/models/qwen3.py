"""A model whose forward cuts a rank's tokens out by itself."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers.modeling_outputs import BaseModelOutputWithPast

from fsdp_turbo.distributed.parallel_state import get_parallel_state


def qwen3_model_forward(
    self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
) -> BaseModelOutputWithPast:
    """Run this rank's columns of [N, L] ids, with a mask of all of them."""
    del kwargs
    group = get_parallel_state().get_ulysses_group()
    hidden = self.embed_tokens(input_ids)
    length = hidden.shape[1]
    sees = attention_mask[:, None, None, :].bool() & (position_ids[:, None, :, None] >= position_ids[:, None, None, :])
    mask = hidden.new_zeros(sees.shape).masked_fill(~sees, -1e30)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    own = slice(rank * length // size, (rank + 1) * length // size)
    hidden, places = hidden[:, own], position_ids[:, own]
    rotary = self.rotary_emb(hidden, places)
    for layer in self.layers:
        hidden = layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=rotary)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))
