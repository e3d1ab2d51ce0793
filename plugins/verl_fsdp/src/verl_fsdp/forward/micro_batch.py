"""One micro-batch through the model, packed or padded.

Shape legend: T tokens of a micro-batch, t those of this rank, m loss tokens that it predicts, F numbers per token,
N sequences, L the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from verl_engine.engine.sum_over_group import sum_over_group
from verl_engine.engine.temperature import rows_of
from verl_engine.engine.token_output import TokenOutput
from verl_engine.engine.top_k import scored_ids
from verl_fsdp.forward.attention import is_packed
from verl_fsdp.forward.head import make_head
from verl_fsdp.forward.rotary import PositionUse, rotary_limit
from verl_fsdp.forward.router_replay import RouterReplay, sources
from verl_fsdp.forward.sequence_parallel import slice_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from transformers import PreTrainedModel

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.temperature import Temperature
    from verl_fsdp.config import ShardedConfig


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


class MicroBatchForward:
    """The forward of one engine's model, made before the model is sharded."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ShardedConfig,
        sequence: dist.ProcessGroup | None,
        split: Callable[[PackedBatch], ModelRun] | None = None,
    ) -> None:
        """Look at how the model begins and ends; nothing is changed in it but how experts are chosen, where asked for.

        Args:
            model: with its adapters.
            config: of the engine.
            sequence: the ranks that split the tokens among them; None where nobody does.
            split: makes a rank's run of a micro-batch, where somebody else splits them.
        """
        self.head = make_head(model, config)
        self.is_packed = is_packed(model)
        """Whether sequences lie end to end; else each has a row. Not for every model, whatever the config says."""
        self._sequence = sequence
        self._split = split
        self._rotary_limit = rotary_limit(model)
        self._positions = PositionUse.of(model)
        self._replay = RouterReplay(model) if config.router_replay else None

    def __call__(self, model: torch.nn.Module, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on a micro-batch; see `Engine.forward`.

        Args:
            model: sharded.
            batch: the micro-batch; the same on all ranks that split its tokens.
            temperature: divides the logits: a number, or [T].
        Raises:
            ModelError: a sequence is so long that the model would change the log-probs of those beside it, or has
                positions that the model does not take.
        """
        if self._rotary_limit is not None:
            highest = int(batch.position_ids.max()) + 1 if batch.has_own_positions else 0
            self._rotary_limit.check((*batch.lengths, highest))
        if batch.has_own_positions:
            self._positions.check(batch.position_ids)
        run = self._run_of(batch)
        source = None
        if self._replay is not None:
            source = sources(self._run_of, batch, self._sequence)
            self._replay.expect(batch, source)
        targets = scored_ids(batch, run.loss_positions)
        numbers_mF = self.head.numbers(model, run, targets, rows_of(temperature, run.loss_positions), batch.top_k)
        zeros_TF = numbers_mF.new_zeros(batch.num_tokens, numbers_mF.shape[1])
        numbers_TF = sum_over_group(zeros_TF.index_put((run.loss_positions,), numbers_mF), self._sequence)
        output = TokenOutput.of(numbers_TF, self.head.columns(batch))
        if self._replay is None or source is None or torch.is_grad_enabled():
            return output
        return replace(output, given_routed_experts=self._replay.found(source, batch.num_tokens, self._sequence))

    def _run_of(self, batch: PackedBatch) -> ModelRun:
        if self._split is not None:
            return self._split(batch)
        return _packed(batch, self._sequence) if self.is_packed else padded(batch)


def _packed(batch: PackedBatch, sequence: dist.ProcessGroup | None) -> ModelRun:
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
