"""From the model's last hidden states to what is said of each token.

Shape legend: T tokens of the micro-batch, t those of this rank, n those of them that this rank holds outside attention
(a part of t with sequence parallelism), m rows of loss tokens, H hidden dim, v entries of the vocabulary on this rank,
F numbers per token.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.sum_over_group import sum_over_group
from verl_engine.engine.temperature import Temperature, rows_of
from verl_engine.engine.token_output import columns_of, numbers_of
from verl_engine.engine.top_k import require_top_k
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.forward.layout import Layout
from verl_megatron_mindspeed.forward.log_probs import split_log_probs
from verl_megatron_mindspeed.parallel import Group, Parallel


class LossRows:
    """Lets a model's output layer see only what predicts loss tokens: logits are the largest tensor."""

    def __init__(self, layer: torch.nn.Module, tensor_group: Group, *, sequence_parallel: bool) -> None:
        """Take hold of the input of the model's last layer.

        With `sequence_parallel` the tensor-parallel ranks hold different tokens of it. It is gathered here then, since
        each has another number of loss tokens, and the layer is told that it is whole.
        """
        self._gathers = sequence_parallel
        self._group = tensor_group
        self._rows: torch.Tensor | None = None
        if sequence_parallel and hasattr(layer, "sequence_parallel"):
            layer.sequence_parallel = False  # type: ignore[assignment] # a plain attribute of Megatron's linear layers
        layer.register_forward_pre_hook(self._pick)

    def expect(self, rows: torch.Tensor) -> None:
        """Say which of the t rows the next call of the model is to give, [m] int64."""
        self._rows = rows

    def _pick(self, _layer: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace [n, 1, H] with [m, 1, H]. Collectives: with sequence parallelism an all-gather."""
        hidden, *others = arguments
        if self._gathers:
            # The layer gives every rank the whole gradient of its input; each keeps its own part.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._group.group
            )
        if self._rows is not None:
            hidden, self._rows = hidden.index_select(0, self._rows), None
        return (hidden, *others)


class Head:
    """Turns the model's output into per-token numbers, as the config asks for them."""

    def __init__(self, config: MegatronConfig, parallel: Parallel, vocab_size: int) -> None:
        """Remember what to compute; `vocab_size` does not count what fills the output layer up."""
        self._is_value = config.head == "value"
        self._entropy = config.entropy
        self._tensor = parallel.tensor
        self._context = parallel.context.group if parallel.context.size > 1 else None
        self._vocab_size = vocab_size

    def columns(self, batch: PackedBatch) -> dict[str, int]:
        """Say which fields of `TokenOutput` the numbers of a micro-batch are; see `TokenOutput.of`."""
        return {"given_values": 1} if self._is_value else columns_of(batch, self._entropy)

    def numbers(self, output: torch.Tensor, layout: Layout, temperature: Temperature) -> torch.Tensor:
        """Return [T, F] float32, 0 outside the loss; the same on all ranks that split the micro-batch.

        Args:
            output: [1, m, v] logits, or [1, m, 1] values.
            layout: of the micro-batch.
            temperature: divides the logits: a number, or [T].
        Collectives: over tensor-parallel ranks those of `split_log_probs`; over context-parallel ranks an all-reduce.
        """
        numbers_mF = output[0].float() if self._is_value else self._of_logits(output[0], layout, temperature)
        zeros_TF = numbers_mF.new_zeros(layout.batch.num_tokens, numbers_mF.shape[1])
        own_mF = numbers_mF[: layout.loss_positions.shape[0]]  # without the row that predicts nothing
        return sum_over_group(zeros_TF.index_put((layout.loss_positions,), own_mF), self._context)

    def _of_logits(self, logits_mv: torch.Tensor, layout: Layout, temperature: Temperature) -> torch.Tensor:
        first = self._tensor.rank * logits_mv.shape[1]
        # What fills the vocabulary up to a number that all ranks can divide comes last, and has no probability.
        num_real = min(max(self._vocab_size - first, 0), logits_mv.shape[1])
        targets_mN, top_k = layout.targets, layout.batch.top_k
        require_top_k(top_k, self._vocab_size)
        temperature = rows_of(temperature, layout.loss_positions)
        if isinstance(temperature, torch.Tensor) and not temperature.numel():
            temperature = temperature.new_ones(1)  # of the row that predicts nothing
        logp_mN, entropy_m = split_log_probs(
            logits_mv[:, :num_real],
            targets_mN,
            temperature,
            self._entropy,
            first=first,
            group=self._tensor.group if self._tensor.size > 1 else None,
            top_k=top_k,
        )
        # An id that no rank has would seem to have a log-prob; elsewhere torch refuses it.
        logp_mN = logp_mN.masked_fill(targets_mN >= self._vocab_size, torch.nan)
        return numbers_of(logp_mN, entropy_m, targets_mN, top_k)
