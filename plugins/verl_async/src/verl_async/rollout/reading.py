"""How a model may read a batch: found out by a trial when it is loaded.

Shapes: B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from verl_async.rollout.cached_model import CachedModel
from verl_async.rollout.grouped_attention import give_back_attention, own_attention, use_grouped_attention
from verl_async.rollout.positions import max_num_tokens
from verl_async.rollout.slot_model import SlotModel
from verl_async.rollout.uncached_model import UncachedModel
from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from verl_async.rollout.routes import RouteRecorder

_LOG = logging.getLogger(__name__)
Reader = SlotModel | CachedModel | UncachedModel
Reading = Literal["slots", "mixed lengths", "equal lengths", "anew"]
"""``slots``: rows join and leave between two tokens. All others keep a batch together until its end. ``mixed
lengths``: shorter contexts are padded on the left. ``equal lengths``: only contexts of one length share a
batch, since padding would run through a recurrent state, or shift positions. ``anew``: no state is kept either."""
_LENGTHS: Final = (3, 1, 70, 70)
"""Of the contexts tried: models that attend in chunks do so beyond 64 tokens."""
_NEXT: Final = (6, 9, 5)
_SHORT: Final = 48
_SPANS: Final = re.compile(r"(?:window|attention_chunk|index_topk|local_attention)(?:_size)?$")
"""Ends of the names of settings that say to how many tokens a token attends."""
_TRIAL_TOKENS: Final = 2**12
_TOLERANCE: Final = {torch.float32: 1e-4}
_COARSE: Final = {"slots": 0.15, "mixed lengths": 0.15, "equal lengths": 0.15, "anew": torch.inf}
"""Root mean square of the differences, seen from that of the logits; in dtypes shorter than float32 the second, where
rounding may send tokens to other experts."""


def find_reading(model: PreTrainedModel) -> Reading:
    """Try the ways from the fastest on, and return the first that gives the logits of a whole forward of each row.

    A model in slots, whose layers are all of usual attention, gets grouped attention if that is right too.

    Args:
        model: ready to generate.
    Raises:
        ModelError: not even reading anew does: tokens see later ones, or the model does not run.
    """
    ways: list[Reading] = ["slots", "mixed lengths", "equal lengths", "anew"]
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        ways = ["anew"]  # it counts positions by what is no padding, over all that it reads
    elif model.dtype != torch.float32 and _has_other_state(model):
        ways = ["equal lengths", "anew"]  # rounding would hide what padding does to the state
    name, reason = type(model).__name__, ""
    for way in ways:
        tolerance = _TOLERANCE.get(model.dtype, _COARSE[way])
        try:
            with torch.inference_mode():
                difference = _difference(model, way)
        except Exception as error:  # noqa: BLE001 - models raise all kinds where they are not made for this
            reason = f"a trial ended with {type(error).__name__}: {error}"
            continue
        if difference <= tolerance:
            if way == "slots":
                _try_grouped_attention(model, tolerance)
            else:
                _LOG.warning("%s cannot be batched continuously: %s", name, _COSTS[way])
            return way
        reason = f"in a trial, token by token, its logits were {difference:.1e} of their size off those of one forward"
    raise ModelError(
        f"{name} is not a causal language model that the embedded rollout engine can run in "
        f"{str(model.dtype).removeprefix('torch.')}: {reason}"
    )


def _try_grouped_attention(model: PreTrainedModel, tolerance: float) -> None:
    if not use_grouped_attention(model):
        return
    with torch.inference_mode():
        try:
            is_right = _difference(model, "slots") <= tolerance
        except Exception:  # noqa: BLE001 - as above
            is_right = False
    if not is_right:
        give_back_attention(model)


_COSTS: Final = {
    "mixed lengths": "a batch is generated to its end before the next begins",
    "equal lengths": "those of one length are generated together, one length after the other",
    "anew": "and it keeps no state between tokens, so that each token costs a forward of all before it",
}


def reader(model: PreTrainedModel, way: Reading, max_tokens: int, recorder: RouteRecorder | None = None) -> Reader:
    """Return what reads a batch in this way; `max_tokens` of room for keys and values, where it makes its own."""
    if way == "slots":
        return SlotModel(model, max_tokens, recorder)
    return UncachedModel(model, recorder) if way == "anew" else CachedModel(model, recorder)


def _difference(model: PreTrainedModel, way: Reading) -> float:
    """Read a few contexts and tokens, taking a row out in between, and compare with whole forwards."""
    with _short_spans(model):
        return _difference_inside(model, way)


@contextmanager
def _short_spans(model: PreTrainedModel) -> Iterator[None]:
    """Have tokens attend, inside, to fewer others than the contexts have, where the config limits that to more.

    What is right only up to the window, or the number of tokens that are selected, would pass for right otherwise.
    """
    config = model.config.get_text_config(decoder=True)
    spans = {
        name: value
        for name, value in vars(config).items()
        if _SPANS.search(name) and type(value) is int and value > _SHORT
    }
    owners = [
        (owner, name, value)
        for owner in (config, *model.modules())
        for name, value in spans.items()
        if vars(owner).get(name) == value
    ]
    for owner, name, _ in owners:
        setattr(owner, name, _SHORT)
    try:
        yield
    finally:
        for owner, name, value in owners:
            setattr(owner, name, value)


def _difference_inside(model: PreTrainedModel, way: Reading) -> float:
    config = model.config.get_text_config(decoder=True)
    limit = (max_num_tokens(model.config) or max(_LENGTHS) + len(_NEXT)) - len(_NEXT)
    contexts = [
        tuple((7 * row + 5 * place + 3) % min(config.vocab_size, 997) for place in range(min(length, limit)))
        for row, length in enumerate(_LENGTHS)
    ]
    parts = [contexts[:1], contexts[1:2], contexts[2:], *([contexts] if way in {"slots", "mixed lengths"} else [])]
    return max(_difference_of(model, way, part) for part in parts)


def _difference_of(model: PreTrainedModel, way: Reading, contexts: Sequence[tuple[int, ...]]) -> float:
    whole = [_whole_forward(model, (*context, *_NEXT)) for context in contexts]
    read = reader(model, way, _TRIAL_TOKENS)
    rows = list(range(len(contexts)))
    differences = []
    logits_BV = read.join(contexts)
    for count, token in enumerate((*_NEXT, None)):
        right_BV = torch.stack([whole[row][len(contexts[row]) - 1 + count] for row in rows])
        differences.append(float((logits_BV - right_BV).float().norm() / right_BV.float().norm()))
        if token is None:
            break
        if count == 1 and len(rows) > 1:
            rows = [rows[-1], *rows[1:-1]]  # the first leaves, and the last takes its place
            read.select([len(contexts) - 1, *range(1, len(contexts) - 1)])
        logits_BV = read.step(torch.full((len(rows),), token, device=model.device))
    return max(differences)


def _whole_forward(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    with own_attention(model):
        logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits
    return logits[0]


def _has_other_state(model: PreTrainedModel) -> bool:
    """Whether more than keys and values goes from token to token."""
    others = (torch.nn.Conv1d, torch.nn.RNNBase)
    return (
        bool(getattr(model, "_is_stateful", False))
        or any(isinstance(module, others) for module in model.modules())
        or not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=model.config).layers)
    )
