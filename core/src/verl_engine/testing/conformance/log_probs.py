"""Log-probs and entropy: what a micro-batch says of each sequence is what the sequence alone says."""

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
    furthest,
    largest_difference,
    load_reference,
    make_sequences,
    masked_log_probs,
    next_log_probs,
    sequence_log_probs,
)

TOLERANCE_NATS: Final = 1e-5
BONUS: Final = 2.0
"""On entropy, in the loss below; the gradient of entropy is small where all tokens are about as likely."""


def together(bench: Bench) -> None:
    """Sequences of all lengths in one micro-batch do not see each other."""
    sequences = make_sequences(9)
    _compare(bench, sequences, bench.driver().infer(sequences), 1.0)


def positions(bench: Bench) -> None:
    """Positions begin anew with each sequence of a micro-batch, on a model that knows where it begins."""
    sequences = make_sequences(3)  # 37 tokens in all: the model has positions for them even where they go on
    _compare(bench, sequences, bench.driver("absolute").infer(sequences), 1.0, "absolute")


def own_positions(bench: Bench) -> None:
    """Positions that come with the sequences are used, on a model that knows where it is."""
    sequences = [
        replace(sequence, positions=np.arange(len(sequence))[::-1] + 5 * index)
        for index, sequence in enumerate(make_sequences(4))
    ]
    _compare(bench, sequences, bench.driver("absolute").infer(sequences), 1.0, "absolute")


def temperature(bench: Bench) -> None:
    """The temperature divides the logits."""
    sequences = make_sequences(1)
    _compare(bench, sequences, bench.driver().infer(sequences, 0.5), 0.5)


def without_loss(bench: Bench) -> None:
    """A micro-batch without loss tokens, or without sequences, gives zeros."""
    driver = bench.driver()
    sequence = make_sequences(1)[0]
    sequence.loss_mask[:] = False
    (found,) = driver.infer([sequence])
    bench.require(not bool(found.any()), f"log-probs outside the loss are not 0: {found.tolist()}")
    bench.require(driver.infer([]) == [], "an empty micro-batch gave log-probs")


def entropy_value(bench: Bench) -> None:
    """With ``entropy: value`` each token has the entropy of the distribution it was drawn from, at its temperature."""
    driver = bench.driver(entropy="value")
    model = load_reference(bench.model())
    for at in (1.0, 0.5):
        for sequence in make_sequences(4):
            found = driver.output(sequence, at)
            with torch.no_grad():
                entropy = torch.where(torch.from_numpy(sequence.loss_mask), sequence_entropy(model, sequence, at), 0.0)
            expected = {"entropies": entropy, "log-probs": masked_log_probs(model, sequence, at)}
            name, worst = furthest({"entropies": found.entropy.cpu(), "log-probs": found.log_probs.cpu()}, expected)
            bench.require(
                worst <= TOLERANCE_NATS,
                f"{name} at temperature {at} are off by {worst:.3g} nats against the plain model",
            )


def entropy_gradient(bench: Bench) -> None:
    """With ``entropy: gradient`` a bonus on entropy has its gradient; with ``entropy: value`` it has none."""
    sequences = make_sequences(8)
    for setting, bonus in (("gradient", BONUS), ("value", 0.0)):
        probe = bench.probe(entropy=setting)
        found = probe.gradient(probe.driver.micro_batches(sequences, len(sequences)), entropy_bonus, 0.5)
        expected = _bonus_gradient(load_reference(bench.model()).double(), sequences, 0.5, bonus)
        what = f"with entropy={setting} the gradient of a loss with a bonus on entropy"
        bench.require_gradient(found, expected, what)


def entropy_bonus(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of -weight * (log-prob + bonus * entropy) over the loss tokens."""
    mask = batch.loss_mask
    weight = batch.fields["weight"][mask] if batch.fields else 0.0
    return -((output.log_probs + BONUS * output.entropy)[mask] * weight).sum(), {}


def _bonus_gradient(model: Any, sequences: list[Sequence], temperature: float, bonus: float) -> dict[str, torch.Tensor]:
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    for sequence in sequences:
        mask = torch.from_numpy(sequence.loss_mask)
        numbers = sequence_log_probs(model, sequence, temperature)
        if bonus:
            numbers = numbers + bonus * sequence_entropy(model, sequence, temperature)
        (-(numbers[mask] * torch.from_numpy(sequence.fields["weight"])[mask]).sum() / num_tokens).backward()
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def sequence_entropy(model: Any, sequence: Sequence, temperature: float) -> torch.Tensor:
    """Return [L]: entropy of the distribution of each token given those before it; 0 for the first."""
    logp_LV = next_log_probs(model, sequence, temperature)
    return torch.cat([logp_LV.new_zeros(1), -(logp_LV.exp() * logp_LV).sum(-1)[:-1]])


def _compare(
    bench: Bench, sequences: list[Sequence], found: list[torch.Tensor], at: float, kind: str = "plain"
) -> None:
    model = load_reference(bench.model(kind))
    expected = [masked_log_probs(model, sequence, at) for sequence in sequences]
    worst = largest_difference(found, expected)
    bench.require(worst <= TOLERANCE_NATS, f"log-probs are off by {worst:.3g} nats against each sequence alone")


CHECKS = (
    Check("log_probs/together", (all_ranks(together),), ("packed_batches",)),
    Check("log_probs/positions", (all_ranks(positions),), ("packed_batches",)),
    Check("log_probs/own_positions", (all_ranks(own_positions),), ("packed_batches", "own_positions")),
    Check("log_probs/temperature", (all_ranks(temperature),)),
    Check("log_probs/without_loss", (all_ranks(without_loss),)),
    Check("log_probs/entropy_value", (all_ranks(entropy_value),), ("entropy",)),
    Check("log_probs/entropy_gradient", (all_ranks(entropy_gradient),), ("entropy",)),
)
