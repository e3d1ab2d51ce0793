"""Tokens through given experts, whatever kind of mixture the model is.

Shape legend: T tokens of a micro-batch, t those that go into this rank's model, row by row, with filling; k experts a
token.
"""

import dataclasses
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.routed_experts import ExpertLayers, experts_of, given_experts, put_back
from verl_fsdp.forward.model_run import ModelRun


class RouterReplay(ExpertLayers):
    """The layers with experts, for micro-batches."""

    def expect(self, batch: PackedBatch, source: torch.Tensor) -> None:
        """Say through which experts the tokens of the next forward go; BatchError where they do not fit the model.

        Args:
            batch: the micro-batch.
            source: [t] int64: what goes into the model, as indices among the T; -1 for filling.
        """
        experts = given_experts(batch, len(self.layers), self.layers[0].num_experts)
        rows = None if experts is None else experts_of(experts, source)
        for index, layer in enumerate(self.layers):
            layer.given, layer.found = None if rows is None else rows[:, index], None

    def found(self, source: torch.Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return [T, layers, k] int32: the experts of the last forward, without gradient; for `source` see `expect`.

        Collectives: an all-reduce over the group of ranks that split the tokens.
        """
        whole = put_back(self.chosen().int(), source, num_tokens)
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole


def sources(
    lay_out: Callable[[PackedBatch], ModelRun], batch: PackedBatch, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return [t] int64: the index among the T of each token that goes into the model; -1 for filling.

    `lay_out` makes the run of a micro-batch, and fills up with token 0; the group's ranks split its tokens.
    """
    numbers = torch.arange(1, batch.num_tokens + 1, device=batch.input_ids.device)
    run = lay_out(dataclasses.replace(batch, input_ids=numbers))
    own = run.inputs["input_ids"]
    if run.num_columns not in (None, own.shape[1]):  # the model's forward takes its part itself
        own = own.split(run.num_columns, dim=1)[dist.get_rank(group)]
    return cast("torch.Tensor", own.flatten() - 1)
