"""One micro-batch through the model, packed or padded.

Shape legend: T tokens of a micro-batch, t those of this rank, m loss tokens it predicts, N sequences, L the longest of
them, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from verl_engine.engine.token_log_probs import token_log_probs
from verl_engine.engine.token_output import TokenOutput
from verl_fsdp.sequence_parallel import slice_tokens

if TYPE_CHECKING:
    import torch.distributed as dist

    from verl_engine.batch.packed import PackedBatch
    from verl_fsdp.config import ShardedConfig


def forward(
    model: torch.nn.Module,
    config: ShardedConfig,
    batch: PackedBatch,
    temperature: float,
    sequence: dist.ProcessGroup | None,
) -> TokenOutput:
    """Run the model on a micro-batch; see `Engine.forward`."""
    logits_MV = _packed_logits(model, batch, sequence) if config.packing else _padded_logits(model, batch)
    return TokenOutput(token_log_probs(logits_MV, batch, temperature))


def _packed_logits(model: torch.nn.Module, batch: PackedBatch, sequence: dist.ProcessGroup | None) -> torch.Tensor:
    """Return [M, V]: the logits that predict each loss token."""
    tokens = slice_tokens(batch, sequence)
    # attention_mask or use_cache would make transformers mix or mask the packed sequences without a word.
    output = model(
        input_ids=tokens.input_ids[None],
        position_ids=tokens.position_ids[None],
        attention_mask=None,
        use_cache=False,
        logits_to_keep=tokens.predictors,
        packed_runs=batch.segment_runs,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _padded_logits(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return [M, V], by way of rows padded on the right to the longest sequence."""
    num_rows, longest = len(batch.lengths), max(batch.lengths)
    rows = torch.repeat_interleave(
        torch.arange(num_rows), torch.tensor(batch.lengths), output_size=batch.num_tokens
    ).to(batch.input_ids.device)
    ids_NL = batch.input_ids.new_zeros(num_rows, longest).index_put((rows, batch.position_ids), batch.input_ids)
    mask_NL = torch.zeros_like(ids_NL).index_put((rows, batch.position_ids), torch.ones_like(batch.input_ids))
    output: Any = model(input_ids=ids_NL, attention_mask=mask_NL, use_cache=False)
    logits: torch.Tensor = output.logits[rows[batch.loss_positions], batch.position_ids[batch.loss_positions] - 1]
    return logits
