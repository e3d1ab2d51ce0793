"""Log-probs: what a micro-batch says of each sequence is what the sequence alone says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.reference import furthest, load_reference, make_sequences, masked_log_probs

if TYPE_CHECKING:
    import torch

    from verl_engine.batch.sequence import Sequence
    from verl_engine.testing.conformance.bench import Bench

TOLERANCE_NATS: Final = 1e-5


def together(bench: Bench) -> None:
    """Sequences of all lengths in one micro-batch do not see each other."""
    sequences = make_sequences(9)
    _compare(bench, sequences, bench.driver().infer(sequences), 1.0)


def positions(bench: Bench) -> None:
    """Positions begin anew with each sequence of a micro-batch, on a model that knows where it begins."""
    sequences = make_sequences(3)  # 37 tokens in all: the model has positions for them even where they go on
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
    bench.require_everywhere(not bool(found.any()), f"log-probs outside the loss are not 0: {found.tolist()}")
    bench.require_everywhere(driver.infer([]) == [], "an empty micro-batch gave log-probs")


def _compare(
    bench: Bench, sequences: list[Sequence], found: list[torch.Tensor], at: float, kind: str = "plain"
) -> None:
    model = load_reference(bench.model(kind))
    expected = [masked_log_probs(model, sequence, at) for sequence in sequences]
    _, worst = furthest(dict(enumerate(found)), dict(enumerate(expected)))
    bench.require_everywhere(
        worst <= TOLERANCE_NATS, f"log-probs are off by {worst:.3g} nats against each sequence alone"
    )


CHECKS = (
    Check("log_probs/together", (all_ranks(together),), ("packed_batches",)),
    Check("log_probs/positions", (all_ranks(positions),), ("packed_batches",)),
    Check("log_probs/temperature", (all_ranks(temperature),)),
    Check("log_probs/without_loss", (all_ranks(without_loss),)),
)
