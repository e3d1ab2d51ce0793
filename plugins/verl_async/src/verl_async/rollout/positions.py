"""How long a sequence may be. Apart from the model itself, whose code takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def max_num_tokens(config: PreTrainedConfig) -> int | None:
    """Tokens of the longest sequence that a model has positions for; None where nothing limits it."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
