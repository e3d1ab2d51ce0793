"""Engines that only infer: a reference policy."""

from typing import Final

from verl_engine.contract.errors import UnsupportedError
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal
from verl_engine.testing.conformance.reference import (
    largest_difference,
    load_reference,
    make_sequences,
    masked_log_probs,
)
from verl_engine.testing.conformance.weights import weights_of

ROUNDING: Final = 1e-6
"""Nats. Weights that lie elsewhere in memory may be multiplied by another kernel; a step changes much more."""


def log_probs(bench: Bench) -> None:
    """Log-probs are those of an engine that trains, and weights those of the folder."""
    driver = bench.driver(forward_only=True)
    sequences = make_sequences(4)
    model = load_reference(bench.model())
    found = driver.infer(sequences)
    distance = largest_difference(found, bench.driver().infer(sequences))
    bench.require(distance <= ROUNDING, f"log-probs differ by {distance:.3g} from those of an engine that trains")
    error = largest_difference(found, [masked_log_probs(model, sequence) for sequence in sequences])
    bench.require(error <= 1e-4, f"log-probs are off by {error:.3g} nats")  # noqa: PLR2004
    bench.require_same(driver.weights(), weights_of(bench.model()), "exported weights and the folder's")


def refuses_training(bench: Bench) -> None:
    """Training is refused with an UnsupportedError and leaves the weights as they are; there is no optimizer."""
    driver = bench.driver(forward_only=True)
    before = driver.weights()
    message = refusal(UnsupportedError, lambda: driver.train(make_sequences(4))) or ""
    bench.require("forward_only" in message, f"training must name engine.forward_only; it said {message!r}")
    bench.require_same(driver.weights(), before, "a refused step changed the weights")
    has_optimizer = "checkpoints" not in bench.gaps and bool(driver.engine.state_dict().get("optimizer"))
    bench.require(not has_optimizer, "the state of a forward-only engine holds that of an optimizer")


def refreshed(bench: Bench) -> None:
    """A trained policy's weights go into a reference policy, and are used."""
    policy, reference = bench.driver(), bench.driver(forward_only=True)
    policy.train(make_sequences(8))
    reference.engine.load_full_weights(policy.weights().items())
    sequences = make_sequences(3)
    distance = largest_difference(reference.infer(sequences), policy.infer(sequences))
    bench.require(distance <= ROUNDING, f"log-probs are {distance:.3g} off: imported weights are not used")


def snapshot(bench: Bench) -> None:
    """A snapshot holds the weights of a reference policy, though none is trained: an import may change them."""
    reference, other = bench.driver(forward_only=True), bench.driver("other")
    snapshots = reference.snapshots()
    before = reference.weights()
    snapshots.save("before")
    reference.engine.load_full_weights(other.weights().items())
    snapshots.restore("before")
    bench.require_same(reference.weights(), before, "after an import, restored and saved weights")


CHECKS = (
    Check("forward_only/log_probs", (all_ranks(log_probs),), ("forward_only",)),
    Check("forward_only/refusal", (all_ranks(refuses_training),), ("forward_only",)),
    Check("forward_only/refreshed", (all_ranks(refreshed),), ("forward_only", "weight_import")),
    Check("forward_only/snapshot", (all_ranks(snapshot),), ("forward_only", "weight_import", "snapshots")),
)
