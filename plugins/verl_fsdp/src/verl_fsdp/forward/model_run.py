"""What goes into a model for one micro-batch, packed or padded.

Shape legend: T tokens of a micro-batch, m loss tokens that this rank predicts, N sequences, L the longest of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_engine.batch.packed import PackedBatch
from verl_fsdp.forward.sequence_parallel import slice_tokens


@dataclass(frozen=True, slots=True)
class ModelRun:
    """What goes into the model, and where in its output this rank's loss tokens are predicted."""

    inputs: dict[str, Any]
    """Arguments of the model."""
    rows: torch.Tensor
    """[m] int64: rows of the model's output."""
    columns: torch.Tensor
    """[m] int64: indices in them, each of the token before the one it predicts."""
    loss_positions: torch.Tensor
    """[m] int64: indices, among the T, of the tokens that are predicted."""
    num_columns: int | None = None
    """How long a row of the output must be, where the model itself may have cut them; None where it cannot."""


def packed(batch: PackedBatch, sequence: dist.ProcessGroup | None) -> ModelRun:
    """Lay all sequences in one row, or this rank's part of it."""
    tokens = slice_tokens(batch, sequence)
    inputs = {
        "input_ids": tokens.input_ids[None],
        "position_ids": tokens.position_ids.unsqueeze(-2),
        # attention_mask or use_cache would make transformers mix or mask the packed sequences silently.
        "attention_mask": None,
        "use_cache": False,
        "packed_runs": tokens.runs,
        "sequence_group": sequence,
    }
    return ModelRun(inputs, torch.zeros_like(tokens.predictors), tokens.predictors, tokens.loss_positions)


def padded(batch: PackedBatch) -> ModelRun:
    """Give each sequence a row, padded on the right to the longest."""
    num_rows, longest = len(batch.lengths), max(batch.lengths)
    rows = torch.repeat_interleave(
        torch.arange(num_rows), torch.tensor(batch.lengths), output_size=batch.num_tokens
    ).to(batch.input_ids.device)
    starts = torch.tensor(batch.lengths, device=rows.device).cumsum(0) - torch.tensor(batch.lengths, device=rows.device)
    columns = torch.arange(batch.num_tokens, device=rows.device) - starts[rows]
    places = (rows, columns)
    ids_NL = batch.input_ids.new_zeros(num_rows, longest).index_put(places, batch.input_ids)
    mask_NL = torch.zeros_like(ids_NL).index_put(places, torch.ones_like(batch.input_ids))
    inputs = {"input_ids": ids_NL, "attention_mask": mask_NL, "use_cache": False}
    if batch.has_own_positions:
        positions = batch.position_ids
        padded_positions = positions.new_zeros(*positions.shape[:-1], num_rows, longest)
        padded_positions[..., rows, columns] = positions
        inputs["position_ids"] = padded_positions
    losses = batch.loss_positions
    return ModelRun(inputs, rows[losses], columns[losses] - 1, losses)
