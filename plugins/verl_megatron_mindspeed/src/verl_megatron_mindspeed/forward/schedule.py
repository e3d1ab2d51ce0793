"""Micro-batches through the model, by Megatron's own schedules.

Shape legend: T tokens of a micro-batch, t those of this rank, F numbers per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.base import MicroBatchPass
from verl_engine.engine.device import Device
from verl_engine.engine.metrics import Key
from verl_engine.engine.temperature import Temperature
from verl_engine.engine.token_output import TokenOutput
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.forward.gradient_contexts import PipelineContexts
from verl_megatron_mindspeed.forward.layout import Layout, lay_out
from verl_megatron_mindspeed.forward.output import Head, LossRows
from verl_megatron_mindspeed.forward.padding_token import exclude_padding_token
from verl_megatron_mindspeed.forward.passes import Pass
from verl_megatron_mindspeed.forward.pipeline import agree, from_last_stage
from verl_megatron_mindspeed.forward.router_replay import RouterReplay
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.parallel import Parallel
from verl_megatron_mindspeed.update.training import Training


class Schedule:
    """Runs micro-batches forward, and backward too."""

    def __init__(self, config: MegatronConfig, model: MegatronModel, parallel: Parallel, device: Device) -> None:
        """Take hold of embedding and output layer where this rank has them; chunks may be wrapped further."""
        self._model = model
        self._parallel = parallel
        self._device = device
        self._head = Head(config, parallel, model.vocab_size)
        self._replay = RouterReplay(model, parallel) if config.router_replay else None
        first, last = model.parts()[0], model.parts()[-1]
        if first.pre_process:
            token = getattr(model.hf_config, "pad_token_id", None)
            exclude_padding_token(first.embedding.word_embeddings, token, model.vocab_size, parallel.tensor)
        self._rows: LossRows | None = None
        if last.post_process:
            self._rows = LossRows(last.output_layer, parallel.tensor, sequence_parallel=config.sequence_parallel)

    def infer(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run a micro-batch forward, without gradient; all ranks that split the model have it, and get the output.

        The temperature is a number, or [T]. What the model raises, it raises on all ranks of the pipeline.
        Collectives: those of the model's parallelism, and a broadcast from the last pipeline stage.
        """
        columns = self._head.columns(batch)
        numbers_TF = torch.empty(batch.num_tokens, sum(columns.values()), device=self._device.torch_device)

        def keep(found_TF: torch.Tensor, layout: Layout) -> torch.Tensor:
            nonlocal numbers_TF
            numbers_TF = numbers_TF if layout.is_filling else found_TF
            return found_TF.new_zeros(())  # there is no backward

        run = Pass(self._model, self._parallel, self._head, self._rows, lambda _: temperature, keep, self._replay)
        with torch.no_grad():
            self._go(run, [batch], forward_only=True)
            if self._parallel.pipeline.size > 1:
                agree(self._parallel, run.guard.take())
            output = TokenOutput.of(from_last_stage(numbers_TF.contiguous(), self._parallel), columns)
            return output if self._replay is None else replace(output, given_routed_experts=self._replay.found())

    def train(self, training: Training, given: MicroBatchPass) -> None:
        """Accumulate the gradient of the scaled loss; see `Engine.forward_backward`.

        Micro-batches are the same on all ranks that split the model, as many on every rank. Totals become the same on
        all ranks of a pipeline, and what loss or model raise is raised on all of them.
        """

        def loss(numbers_TF: torch.Tensor, layout: Layout) -> torch.Tensor:
            if layout.is_filling:
                return numbers_TF.sum()  # it has no loss tokens, so it is 0, and so is its gradient
            return given.loss(TokenOutput.of(numbers_TF, self._head.columns(layout.batch)), layout.batch)

        run = Pass(self._model, self._parallel, self._head, self._rows, given.temperature, loss, self._replay)
        transformer = self._model.transformer
        scale = transformer.grad_scale_func

        def scaled(loss: torch.Tensor) -> torch.Tensor:
            return (loss if scale is None else scale(loss)) * given.loss_scale

        # Megatron scales the router's own losses by the same function, so it has to hold all factors.
        with _fields(transformer, grad_scale_func=scaled):
            if self._parallel.pipeline.size > 1:
                self._train_pipeline(run, training, given)
                return
            for index, (batch, sync) in enumerate(given, 1):
                finalize = training.gradients.finalize if index == len(given.micro_batches) else None
                with sync, _fields(transformer, finalize_model_grads_func=finalize):
                    self._go(run, [batch])

    def _train_pipeline(self, run: Pass, training: Training, given: MicroBatchPass) -> None:
        keys: tuple[Key, ...] = ()

        def finalize(*arguments: Any, **options: Any) -> None:
            nonlocal keys
            # Before anything is reduced: where a backward is missing, so are some of Megatron's reductions.
            keys = agree(self._parallel, run.guard.take(), given.totals.keys)
            training.gradients.finalize(*arguments, **options)

        with PipelineContexts(given, self._model.chunks) as contexts:
            options = {"no_sync_func": contexts.hold, "finalize_model_grads_func": finalize}
            with _fields(self._model.transformer, **options):
                self._go(run, given.micro_batches)
        given.totals.take(keys, from_last_stage(given.totals.vector(keys), self._parallel))

    def _go(self, run: Pass, batches: Sequence[PackedBatch], *, forward_only: bool = False) -> None:
        chunks = self._model.chunks
        if self._replay is not None:
            self._replay.begin(is_training=not forward_only)
        split = self._model.transformer.sequence_parallel
        inputs = [
            lay_out(batch, self._parallel, sequence_parallel=split, is_filling=index >= len(batches))
            for index, batch in enumerate(self._filled(batches))
        ]
        iterators = [iter(inputs) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=run.step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(inputs),
            # What stages send each other says its own shape (variable_seq_lengths).
            seq_length=inputs[0].input_ids.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _filled(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Add empty micro-batches where the interleaved schedule needs a certain number."""
        filled = list(batches)
        if len(self._model.chunks) > 1:
            size = self._parallel.pipeline.size
            group = self._model.transformer.microbatch_group_size_per_vp_stage
            while len(filled) < group or 0 < len(filled) % group < size:
                filled.append(PackedBatch.from_sequences([], self._device.torch_device))
        return filled


@contextmanager
def _fields(target: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
