"""One call of Megatron's schedule: what a stage computes of each micro-batch.

Shape legend: T tokens of a micro-batch, n those that this rank holds between stages, H hidden dim, F numbers per token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.temperature import Temperature
from verl_megatron_mindspeed.forward.guard import Guard
from verl_megatron_mindspeed.forward.layout import Layout, lay_out
from verl_megatron_mindspeed.forward.output import Head, LossRows
from verl_megatron_mindspeed.forward.router_replay import RouterReplay
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Laid:
    """A micro-batch with its layout."""

    batch: PackedBatch
    layout: Layout
    is_filling: bool
    """Whether it is only there to make up the number that the schedule needs."""


class Pass:
    """Steps through micro-batches, as Megatron's schedule calls for them."""

    def __init__(
        self,
        model: MegatronModel,
        parallel: Parallel,
        head: Head,
        rows: LossRows | None,
        temperature: Callable[[PackedBatch], Temperature],
        finish: Callable[[torch.Tensor, Laid], torch.Tensor],
        replay: RouterReplay | None,
    ) -> None:
        """Begin.

        Args:
            model: all its chunks.
            parallel: who splits what.
            head: makes per-token numbers of the model's output.
            rows: picks those of loss tokens; None where this rank has no output layer.
            temperature: gives what divides the logits of a micro-batch.
            finish: takes the numbers of a micro-batch, [T, F]; returns what its backward begins with.
            replay: the routers, where tokens may be sent through given experts.
        """
        self._model = model
        self._parallel = parallel
        self._head = head
        self._rows = rows
        self._temperature = temperature
        self._finish = finish
        self._replay = replay
        self._is_half = model.transformer.params_dtype is not torch.float32
        self.guard = Guard()
        """What went wrong on this rank, where others of a pipeline would wait for it."""

    def lay_out(self, batches: Sequence[PackedBatch], num_real: int) -> list[Laid]:
        """Lay micro-batches out; those after the first `num_real` are filling."""
        sequence_parallel = self._model.transformer.sequence_parallel
        return [
            Laid(
                batch,
                lay_out(batch, self._parallel, sequence_parallel=sequence_parallel),
                index >= num_real,
            )
            for index, batch in enumerate(batches)
        ]

    def step(self, iterator: Iterator[Laid], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Run a part of the model on the next micro-batch: Megatron's ``forward_step_func``.

        Returns:
            What the next stage takes, [n, 1, H], or what the backward begins with; and a function to which Megatron
            gives the latter, to hear that there is nothing to divide it by.
        """
        laid = next(iterator)
        if self._parallel.pipeline.size == 1:
            return self._compute(chunk, laid), _as_it_is
        part = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        given = part.decoder.input_tensor

        def compute(own: torch.Tensor | None) -> torch.Tensor:
            part.set_input_tensor([own])
            return self._compute(chunk, laid)

        return self.guard.run(compute, given, partial(self._fake, laid.layout, part)), _as_it_is

    def _compute(self, chunk: torch.nn.Module, laid: Laid) -> torch.Tensor:
        layout = laid.layout
        is_last = self._rows is not None and chunk is self._model.chunks[-1]
        if self._rows is not None and is_last:
            self._rows.expect(layout.rows)
        # Logits may stay as they are: float32 is made of them a block at a time.
        options = {"fp32_output": False} if self._is_half else {}
        if self._replay is not None:
            self._replay.expect(laid.batch, layout, is_filling=laid.is_filling)
        output: torch.Tensor = chunk(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            attention_mask=None,
            packed_seq_params=layout.packed,
            **options,
        )
        if self._replay is not None:
            self._replay.check()
        if not is_last:
            return output
        return self._finish(self._head.numbers(output, layout, self._temperature(laid.batch)), laid)

    def _fake(self, layout: Layout, part: Any) -> torch.Tensor:
        """Return zeros in place of the output of a part of the model."""
        transformer = self._model.transformer
        device = layout.input_ids.device
        if part.post_process:
            return torch.zeros((), device=device)
        num_held = layout.input_ids.shape[1] // (self._parallel.tensor.size if transformer.sequence_parallel else 1)
        return torch.zeros(num_held, 1, transformer.hidden_size, dtype=transformer.pipeline_dtype, device=device)


def _as_it_is(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Tell Megatron to divide the loss by no number of tokens, as it is scaled already."""
    return output, torch.zeros((), dtype=torch.int32, device=output.device), None
