"""What the model ends in: from its last hidden states to the numbers of each loss token.

Shape legend: B rows and L tokens of the model's input, m loss tokens that are predicted, N ids whose log-probs are
asked for in the place of each, H hidden dim, V vocabulary, F numbers per token.
"""

import logging
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import ModelError
from verl_engine.engine.linear_log_probs import linear_log_probs
from verl_engine.engine.output_from_logits import numbers_from_logits
from verl_engine.engine.temperature import Temperature
from verl_engine.engine.token_output import columns_of, numbers_of
from verl_fsdp.config import ShardedConfig
from verl_fsdp.forward.model_run import ModelRun
from verl_fsdp.forward.output_layer import ending_of, forward_of

_LOG = logging.getLogger(__name__)


class Head:
    """Runs the model, and computes what a `TokenOutput` holds: values of a critic, else log-probs and maybe entropy.

    Where the model's output is what a linear layer gives, the layer computes log-probs itself, chunk by chunk, and the
    logits of all tokens never exist. It does so inside the model's forward, where its weight is gathered.
    """

    def __init__(self, model: PreTrainedModel, config: ShardedConfig) -> None:
        """Look at how a model ends that has its adapters, and is not sharded yet; nothing is changed in it."""
        self._is_value = config.head == "value"
        self._entropy = config.entropy
        self._chunk = config.logit_chunk
        self._layer: Any = None if self._is_value else model.get_output_embeddings()
        self._ending = "unknown" if self._is_value else ending_of(model)
        if self._ending != "linear" and not self._is_value:
            _LOG.info(
                "the output of %s is not that of a plain linear layer: the logits of all %s exist at once, and "
                "engine.logit_chunk=%d has no effect",
                type(model).__name__,
                "loss tokens" if self._ending == "per token" else "tokens",
                config.logit_chunk,
            )

    def columns(self, batch: PackedBatch) -> dict[str, int]:
        """Say which fields of `TokenOutput` the numbers of a micro-batch are; see `TokenOutput.of`."""
        return {"given_values": 1} if self._is_value else columns_of(batch, self._entropy)

    def numbers(
        self, model: torch.nn.Module, run: ModelRun, targets: torch.Tensor, temperature: Temperature, top_k: int
    ) -> torch.Tensor:
        """Call the model, and return [m, F] float32.

        Args:
            model: as sharded.
            run: what goes in, and where the loss tokens are predicted.
            targets: [m, N] int64: the loss tokens, and other ids. Neither they nor what follows concern values.
            temperature: divides the logits: a number, or [m].
            top_k: so many of the last targets are found here.
        """
        if self._ending == "linear":
            return self._linear(model, run, targets, temperature, top_k)
        if self._ending == "per token":
            output_mV = self._per_token(model, run)
        else:
            output_mV = _checked(model(**run.inputs).logits, run)[run.rows, run.columns]
        if self._is_value:
            return output_mV.float()
        found = numbers_from_logits(output_mV, targets, temperature, self._entropy, top_k)
        return numbers_of(*found, targets, top_k)

    def _linear(
        self, model: torch.nn.Module, run: ModelRun, targets: torch.Tensor, temperature: Temperature, top_k: int
    ) -> torch.Tensor:
        """Let the layer give [1, m, F] in place of logits."""
        given: list[torch.Tensor] = []

        def forward(hidden_BLH: torch.Tensor) -> torch.Tensor:
            found = linear_log_probs(
                _picked(hidden_BLH, run),
                self._layer.weight,
                targets,
                temperature,
                self._layer.bias,
                chunk=self._chunk,
                entropy=self._entropy,
                top_k=top_k,
            )
            # Stacked, it is no view, which fully_shard warns of.
            given.append(torch.stack([numbers_of(*found, targets, top_k)]))
            return given[0]

        with forward_of(self._layer, forward):
            found = model(**run.inputs).logits
        if len(given) != 1 or found is not given[0]:
            raise ModelError(
                f"{type(model).__name__} treats the output of its last layer otherwise than when it was loaded; the "
                "fsdp backends cannot run it"
            )
        numbers: torch.Tensor = found[0]
        return numbers

    def _per_token(self, model: torch.nn.Module, run: ModelRun) -> torch.Tensor:
        """Let the layer see the loss tokens' hidden states only; return [m, V] after what the model does then."""
        plain = self._layer.forward
        with forward_of(self._layer, lambda hidden_BLH: plain(_picked(hidden_BLH, run)[None])):
            logits = model(**run.inputs).logits
        return cast("torch.Tensor", logits[0])


def _picked(hidden_BLH: torch.Tensor, run: ModelRun) -> torch.Tensor:
    """Return [m, H]: the states that predict loss tokens."""
    return _checked(hidden_BLH, run).flatten(0, 1).index_select(0, run.rows * hidden_BLH.shape[1] + run.columns)


def _checked(output_BL: torch.Tensor, run: ModelRun) -> torch.Tensor:
    """Return what the model gave; ModelError where it has another length, so that other tokens would be picked."""
    if run.num_columns not in (None, output_BL.shape[1]):
        raise ModelError(
            f"the model gave {output_BL.shape[1]} tokens per row, and a rank's part is {run.num_columns}: its forward "
            "does not split sequences over ranks as it was said to"
        )
    return output_BL
