"""Log-probs of K other token ids in the place of each: given ones, with their gradient, and the most likely ones."""

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.engine.base import TokenOutput
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.reference import (
    load_reference,
    make_sequences,
    next_log_probs,
    relative_error,
    weighted_loss,
    with_temperatures,
)

K: Final = 5
NUM_SEQUENCES: Final = 8
TOLERANCE: Final = 1e-5
"""In nats, and relative for gradients."""


def given_ids(bench: Bench) -> None:
    """A loss on log-probs of given ids, at each token's temperature, has their gradient; inference gives the same."""
    sequences = _with_ids(with_temperatures(make_sequences(NUM_SEQUENCES)))
    probe = bench.probe()
    found = probe.gradient(bench.divide(probe.driver, sequences), chosen_loss)
    error = relative_error(found, _gradient(load_reference(bench.model()).double(), sequences))
    bench.require(error <= TOLERANCE, f"the gradient of log-probs of given ids is off by {error:.3g}")
    model = load_reference(bench.model())
    for sequence in sequences:
        log_probs = probe.driver.output(sequence).top_k_log_probs.cpu()
        with torch.no_grad():
            right = _at(_place_log_probs(model, sequence), torch.from_numpy(sequence.fields["top_k_ids"]))
        _require_near(bench, "log-probs of given ids are", log_probs, right, sequence)


def most_likely(bench: Bench) -> None:
    """The most likely ids are those of the whole vocabulary, in order, with their log-probs, at any temperature."""
    driver = bench.driver()
    model = load_reference(bench.model())
    for at in (1.0, 0.5):
        for sequence in make_sequences(4):
            output = driver.output(sequence, at, K)
            log_probs, ids = output.top_k_log_probs.cpu(), output.top_k_ids.cpu()
            with torch.no_grad():
                right_LV = _place_log_probs(model, sequence, at)
            _require_near(bench, "the highest log-probs are", log_probs, right_LV.topk(K).values, sequence)
            # By their log-probs: which of two ids is the likelier may be a matter of rounding.
            _require_near(bench, "log-probs of the most likely ids are", _at(right_LV, ids), log_probs, sequence)


def chosen_loss(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The kit's loss, and the sum of -weight * log-prob over the given ids of loss tokens."""
    loss, _ = weighted_loss(output, batch)
    weight = batch.fields["id_weights"][batch.loss_mask] if batch.fields else 0.0  # an empty micro-batch has no fields
    return loss - (output.top_k_log_probs[batch.loss_mask] * weight).sum(), {}


def _with_ids(sequences: list[Sequence], vocab_size: int = 32) -> list[Sequence]:
    """Give each token ids and weights of both signs; an id may come twice, or be the token's own."""
    random = np.random.default_rng(11)
    return [
        replace(
            sequence,
            fields={
                **sequence.fields,
                "top_k_ids": random.integers(0, vocab_size, (len(sequence), K), np.int32),
                "id_weights": random.normal(size=(len(sequence), K)).astype(np.float32),
            },
        )
        for sequence in sequences
    ]


def _gradient(model: Any, sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    for sequence in sequences:
        logp_LV, mask = _place_log_probs(model, sequence), torch.from_numpy(sequence.loss_mask)
        fields = {name: torch.from_numpy(array) for name, array in sequence.fields.items()}
        own = _at(logp_LV, torch.from_numpy(sequence.token_ids)[:, None])[:, 0] * fields["weight"]
        chosen = _at(logp_LV, fields["top_k_ids"]) * fields["id_weights"]
        (-(own[mask].sum() + chosen[mask].sum()) / num_tokens).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def _place_log_probs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Return [L, V]: log-probs of all ids in the place of each token; row 0 says nothing."""
    return next_log_probs(model, sequence, temperature).roll(1, dims=0)


def _at(logp_LV: torch.Tensor, ids_LK: torch.Tensor) -> torch.Tensor:
    return logp_LV.gather(1, ids_LK.long())


def _require_near(bench: Bench, what: str, found: torch.Tensor, right: torch.Tensor, sequence: Sequence) -> None:
    mask = torch.from_numpy(sequence.loss_mask)
    error = float((found - right)[mask].abs().max()) if mask.any() else 0.0
    bench.require(error <= TOLERANCE, f"{what} off by {error:.3g} nats against the plain model")


CHECKS = (
    Check("top_k/given_ids", (all_ranks(given_ids),), ("top_k_log_probs",)),
    Check("top_k/most_likely", (all_ranks(most_likely),), ("top_k_log_probs",)),
)
