"""A trial of a model before it is sharded: does it keep packed sequences apart?

Shape legend: T tokens of all sequences, N sequences, L the longest of them, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from transformers import PreTrainedModel

from verl_engine.batch.packed import SegmentRun
from verl_engine.contract.errors import ModelError
from verl_engine.engine.routed_experts import ExpertLayers
from verl_fsdp.forward.attention import PACKED_ATTENTION
from verl_fsdp.forward.rotary import rotary_limit
from verl_fsdp.model.blocks import layer_lists

T = TypeVar("T")
_LENGTHS: Final = (3, 70, 70)
"""Models that attend in chunks do so beyond 64 tokens."""
_TOLERANCE: Final = 1e-4
"""Of the largest logit; rounding makes up 1e-6 of it, in float32."""
_MOST_WEIGHTS: Final = 32 * 10**9
"""That a trial runs: by estimate some minutes of a CPU, while other ranks wait. Up to its first layer with experts
DeepSeek V3 has about 15 billion."""


class _TooLargeError(ModelError):
    """The model cannot be tried in reasonable time."""


def tell_sequences_apart(model: PreTrainedModel, attention: str) -> str | None:
    """Set an attention, run a few tokens together with it, and alone eagerly; say what is wrong, or None.

    The model, with its weights, runs on the CPU, through its first layers until each kind of layer had its turn: a
    trial of a big model costs what a few of its layers do. In evaluation mode, without gradient. In a dtype below
    float32 only whether it runs is looked at, for rounding alone may send tokens to other experts.

    Args:
        model: not sharded.
        attention: ours, for sequences end to end; or one of transformers', for one per row, padded on the right.
    Raises:
        ModelError: so many of its weights would have to run that it is not tried.
    """
    try:
        return _on_first_layers(model, lambda: _trial(model, attention), "whether it keeps sequences apart")
    except _TooLargeError:
        raise
    except Exception as error:  # noqa: BLE001 - models raise all kinds where they are not made for this
        return str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
    finally:
        _attend_by(model, attention)


def require_replay(model: PreTrainedModel) -> None:
    """Check that tokens can be sent through given experts: their own change nothing, and others do.

    The model is one that `tell_sequences_apart` takes, not packed yet; ModelError where it has no experts, or chooses
    them in another way.
    """
    layers = ExpertLayers(model)
    ids = _rows(model)[1][None]

    def trial() -> None:
        layers.require_followed(lambda: model(input_ids=ids, use_cache=False).logits)

    try:
        _on_first_layers(model, trial, "whether its tokens can be given experts")
    finally:
        layers.release()


def _on_first_layers(model: PreTrainedModel, trial: Callable[[], T], what: str) -> T:
    """Run a trial in evaluation mode, without gradient, with the first layers only where that is possible."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            try:
                with _first_layers(model):
                    _require_small(model, what, "the layers up to the first of each kind")
                    return trial()
            except ModelError:
                raise
            except Exception as error:  # noqa: BLE001 - it may count its layers, so all of them run
                why = f"all its layers (the first ones alone fail: {type(error).__name__}: {error})"
                _require_small(model, what, why)
                return trial()
    finally:
        model.train(training)


def _require_small(model: PreTrainedModel, what: str, running: str) -> None:
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights > _MOST_WEIGHTS:
        raise _TooLargeError(
            f"{type(model).__name__} cannot be tried for {what}: that would run {running} on the CPU, "
            f"{num_weights / 1e9:.3g} billion weights, and at most {_MOST_WEIGHTS / 1e9:.3g} are run; use a smaller "
            "model of this kind, or another engine.backend"
        )


def _trial(model: PreTrainedModel, attention: str) -> str | None:
    rows = _rows(model)
    _attend_by(model, "eager")
    alone = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in rows]
    _attend_by(model, attention)
    together = _packed(model, rows) if attention == PACKED_ATTENTION else _padded(model, rows)
    return _difference(together, alone)


def _attend_by(model: PreTrainedModel, attention: str) -> None:
    if model._can_set_attn_implementation() and attention != model.config._attn_implementation:  # noqa: SLF001
        model.set_attn_implementation(attention)


def _rows(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return tokens that the model has, the first row the beginning of the others."""
    config = model.config.get_text_config(decoder=True)
    rotary = rotary_limit(model)  # beyond it a token's frequencies depend on those that come after it
    limits = [getattr(config, "max_position_embeddings", None), rotary and rotary.num_tokens]
    limit = min((limit for limit in limits if limit and limit > 0), default=max(_LENGTHS))  # -1 is no limit in XLNet
    padding = getattr(config, "pad_token_id", None)
    tokens = [token for token in range(min(config.vocab_size, max(_LENGTHS))) if token != padding]
    return [torch.tensor((tokens * max(_LENGTHS))[: min(length, limit)]) for length in _LENGTHS]


def _packed(model: PreTrainedModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    first, second = len(rows[0]), len(rows[1])
    inputs = {
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        "packed_runs": (SegmentRun(0, 1, first), SegmentRun(first, 2, second)),
        "sequence_group": None,
    }
    logits_1TV = model(input_ids=torch.cat(rows)[None], attention_mask=None, use_cache=False, **inputs).logits
    return list(logits_1TV[0].split([len(row) for row in rows]))


def _padded(model: PreTrainedModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    ids_NL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_NL = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits_NLV = model(input_ids=ids_NL, attention_mask=mask_NL, use_cache=False).logits
    return [logits_LV[: len(row)] for logits_LV, row in zip(logits_NLV, rows, strict=True)]


def _difference(together: list[torch.Tensor], alone: list[torch.Tensor]) -> str | None:
    if alone[0].dtype != torch.float32:
        return None
    limit = _TOLERANCE * max(float(logits.abs().max()) for logits in alone)
    if _farthest(alone[0], alone[1][: len(alone[0])]) > limit:
        return "in a trial, tokens saw those that come after them"
    difference = max(_farthest(own, right) for own, right in zip(together, alone, strict=True))
    if difference > limit:
        return f"in a trial, logits of sequences that ran together were {difference:.1e} off those of each alone"
    return None


def _farthest(own: torch.Tensor, right: torch.Tensor) -> float:
    return float((own - right).abs().max())


@contextmanager
def _first_layers(model: PreTrainedModel) -> Iterator[None]:
    """Leave out, inside, the layers after which no other kind comes; where they cannot be told, none."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    lists = layer_lists(model)
    for owner, name, layers in lists:
        kinds = [_kind(layer, types[index] if index < len(types) else "") for index, layer in enumerate(layers)]
        count = 1 + max(kinds.index(kind) for kind in set(kinds))
        owner._modules[name] = torch.nn.ModuleList(list(layers)[:count])  # noqa: SLF001 - keeps its place
    try:
        yield
    finally:
        for owner, name, layers in lists:
            owner._modules[name] = layers  # noqa: SLF001


def _kind(layer: torch.nn.Module, layer_type: str) -> tuple[Any, ...]:
    return layer_type, *((name, type(module)) for name, module in layer.named_modules())
