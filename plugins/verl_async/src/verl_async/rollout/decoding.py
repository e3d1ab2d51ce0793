"""The decode loop: draw a token for each row, end rows, shrink the batch, read the tokens, again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from verl_async.rollout.active_rows import ActiveRows
from verl_async.rollout.reading import reader
from verl_async.rollout.sampling import draw_tokens
from verl_async.rollout.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Event

    from transformers import PreTrainedModel

    from verl_async.rollout.interface import GenerationRequest
    from verl_async.rollout.reading import Reading

_SHRINK_AT: Final = 0.75
"""The batch drops its ended rows once no more than this share is alive: dropping copies the cache of the others."""


@torch.inference_mode()
def decode(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], interrupted: Event, reading: Reading
) -> Transcript:
    """Generate until every row has ended or the event is set.

    The event is looked at before the contexts are read, and after each token. So a call that has read its contexts
    draws at least one token: however often it is interrupted, work goes on.

    Args:
        model: In evaluation mode.
        requests: At least one, each with tokens left to generate.
        interrupted: Set by another thread to end between two tokens.
        reading: How the model reads; unless that is ``mixed lengths``, all contexts are of one length.
    Returns:
        The new tokens only.
    """
    transcript = Transcript(len(requests))
    if interrupted.is_set():
        return transcript
    rows = ActiveRows(requests, model.device)
    read = reader(model, reading)
    logits_BV = read.prefill([context_of(request) for request in requests])
    while True:
        token_B, log_prob_B = draw_tokens(logits_BV, rows.sampling, rows.next_uniform())
        transcript.append(rows.index_B, rows.alive_B, token_B, log_prob_B)
        num_alive = rows.end_finished(token_B)
        if num_alive == 0 or interrupted.is_set():
            return transcript
        if num_alive <= _SHRINK_AT * len(token_B):
            kept = rows.alive_B.nonzero()[:, 0]
            rows.select(kept)
            read.select(kept)
            token_B = token_B[kept]
        logits_BV = read.step(token_B)


def context_of(request: GenerationRequest) -> tuple[int, ...]:
    """Return what is read before the next token is drawn."""
    return (*request.prompt_ids, *request.so_far.token_ids) if request.so_far else tuple(request.prompt_ids)
