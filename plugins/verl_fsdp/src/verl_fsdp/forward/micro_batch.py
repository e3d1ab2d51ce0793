"""One micro-batch through the model, packed or padded.

Shape legend: T tokens of a micro-batch, m loss tokens that this rank predicts, F numbers per token.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.sum_over_group import sum_over_group
from verl_engine.engine.temperature import Temperature, rows_of
from verl_engine.engine.token_output import TokenOutput
from verl_engine.engine.top_k import scored_ids
from verl_fsdp.config import ShardedConfig
from verl_fsdp.forward.attention import is_packed
from verl_fsdp.forward.head import Head
from verl_fsdp.forward.model_run import ModelRun, packed, padded
from verl_fsdp.forward.rotary import PositionUse, rotary_limit
from verl_fsdp.forward.router_replay import RouterReplay, sources


class MicroBatchForward:
    """The forward of one engine's model, made before the model is sharded."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ShardedConfig,
        sequence: dist.ProcessGroup | None,
        split: Callable[[PackedBatch], ModelRun] | None = None,
    ) -> None:
        """Look at how the model, with its adapters, begins and ends; only the choice of experts is changed in it.

        Where somebody else than the ranks of `sequence` splits micro-batches, `split` makes a rank's run of one.
        """
        self.head = Head(model, config)
        self.is_packed = is_packed(model)
        """Whether sequences lie end to end; else each has a row. Not for every model, whatever the config says."""
        self._sequence = sequence
        self._split = split
        self._rotary_limit = rotary_limit(model)
        self._positions = PositionUse(model)
        self._replay = RouterReplay(model) if config.router_replay else None

    def __call__(self, model: torch.nn.Module, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the sharded model on a micro-batch, the same on all ranks that split its tokens; see `Engine.forward`.

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
        return packed(batch, self._sequence) if self.is_packed else padded(batch)
