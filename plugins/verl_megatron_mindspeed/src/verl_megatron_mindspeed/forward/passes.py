"""One call of Megatron's schedule: what a stage computes of each micro-batch.

Shape legend: T tokens of a micro-batch, n those that this rank holds between stages, H hidden dim, F numbers per token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.temperature import Temperature
from verl_megatron_mindspeed.forward.guard import Guard
from verl_megatron_mindspeed.forward.layout import Layout
from verl_megatron_mindspeed.forward.output import Head, LossRows
from verl_megatron_mindspeed.forward.router_replay import RouterReplay
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.parallel import Parallel


@dataclass(slots=True)
class Pass:
    """Steps through micro-batches, as Megatron's schedule calls for them."""

    model: MegatronModel
    parallel: Parallel
    head: Head
    rows: LossRows | None
    """Picks those of loss tokens; None where this rank has no output layer."""
    temperature: Callable[[PackedBatch], Temperature]
    """Gives what divides the logits of a micro-batch."""
    finish: Callable[[torch.Tensor, Layout], torch.Tensor]
    """Takes the numbers of a micro-batch, [T, F]; returns what its backward begins with."""
    replay: RouterReplay | None
    """The routers, where tokens may be sent through given experts."""
    guard: Guard = field(default_factory=Guard)
    """What went wrong on this rank, where others of a pipeline would wait for it."""

    def step(self, iterator: Iterator[Layout], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Run a part of the model on the next micro-batch: Megatron's ``forward_step_func``.

        Returns:
            What the next stage takes, [n, 1, H], or what the backward begins with; and a function to which Megatron
            gives the latter, to hear that there is nothing to divide it by.
        """
        layout = next(iterator)
        if self.parallel.pipeline.size == 1:
            return self._compute(chunk, layout), _as_it_is
        part = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        given = part.decoder.input_tensor

        def compute(own: torch.Tensor | None) -> torch.Tensor:
            part.set_input_tensor([own])
            return self._compute(chunk, layout)

        return self.guard.run(compute, given, partial(self._fake, layout, part)), _as_it_is

    def _compute(self, chunk: torch.nn.Module, layout: Layout) -> torch.Tensor:
        is_last = self.rows is not None and chunk is self.model.chunks[-1]
        if self.rows is not None and is_last:
            self.rows.expect(layout.rows)
        # Logits may stay as they are: float32 is made of them a block at a time.
        options = {"fp32_output": False} if self.model.transformer.params_dtype is not torch.float32 else {}
        if self.replay is not None:
            self.replay.expect(layout)
        output: torch.Tensor = chunk(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            attention_mask=None,
            packed_seq_params=layout.packed,
            **options,
        )
        if self.replay is not None:
            self.replay.check()
        if not is_last:
            return output
        return self.finish(self.head.numbers(output, layout, self.temperature(layout.batch)), layout)

    def _fake(self, layout: Layout, part: Any) -> torch.Tensor:
        """Return zeros in place of the output of a part of the model."""
        transformer = self.model.transformer
        device = layout.input_ids.device
        if part.post_process:
            return torch.zeros((), device=device)
        num_held = layout.input_ids.shape[1] // (self.parallel.tensor.size if transformer.sequence_parallel else 1)
        return torch.zeros(num_held, 1, transformer.hidden_size, dtype=transformer.pipeline_dtype, device=device)


def _as_it_is(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Tell Megatron to divide the loss by no number of tokens, as it is scaled already."""
    return output, torch.zeros((), dtype=torch.int32, device=output.device), None
