"""Engines that only infer: a reference policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from verl_engine.contract.errors import UnsupportedError
from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs
from verl_engine.testing.conformance.weights import weights_of

if TYPE_CHECKING:
    from verl_engine.testing.conformance.bench import Bench

ROUNDING: Final = 1e-6
"""Nats. Weights that lie elsewhere in memory may be multiplied by another kernel; a step changes much more."""


def log_probs(bench: Bench) -> None:
    """Log-probs are those of an engine that trains, and weights those of the folder."""
    driver = bench.driver(forward_only=True)
    sequences = make_sequences(4)
    model = load_reference(bench.model())
    pairs = zip(driver.infer(sequences), bench.driver().infer(sequences), sequences, strict=True)
    for mine, other, sequence in pairs:
        distance = float((mine - other).abs().max())
        bench.require_everywhere(
            distance <= ROUNDING, f"log-probs differ by {distance:.3g} from those of an engine that trains"
        )
        error = float((mine - masked_log_probs(model, sequence)).abs().max())
        bench.require_everywhere(error <= 1e-4, f"log-probs are off by {error:.3g} nats")  # noqa: PLR2004
    found = differences(driver.weights(), weights_of(bench.model()))
    bench.require_everywhere(found == "none", f"exported weights and the folder's: {found}")


def refusal(bench: Bench) -> None:
    """Training is refused with an UnsupportedError and leaves the weights as they are; there is no optimizer."""
    driver = bench.driver(forward_only=True)
    before = driver.weights()
    message = ""
    try:
        driver.train(make_sequences(4))
    except UnsupportedError as error:
        message = str(error)
    bench.require_everywhere("forward_only" in message, f"training must name engine.forward_only; it said {message!r}")
    found = differences(driver.weights(), before)
    bench.require_everywhere(found == "none", f"a refused step changed the weights: {found}")
    has_optimizer = "checkpoints" not in bench.gaps and bool(driver.engine.state_dict().get("optimizer"))
    bench.require_everywhere(not has_optimizer, "the state of a forward-only engine holds that of an optimizer")


def refreshed(bench: Bench) -> None:
    """A trained policy's weights go into a reference policy, and are used."""
    policy, reference = bench.driver(), bench.driver(forward_only=True)
    policy.train(make_sequences(8))
    reference.engine.load_full_weights(policy.weights().items())
    sequences = make_sequences(3)
    pairs = zip(reference.infer(sequences), policy.infer(sequences), strict=True)
    distance = max(float((mine - other).abs().max()) for mine, other in pairs)
    bench.require_everywhere(distance <= ROUNDING, f"log-probs are {distance:.3g} off: imported weights are not used")


def snapshot(bench: Bench) -> None:
    """A snapshot holds the weights of a reference policy, though none is trained: an import may change them."""
    reference, other = bench.driver(forward_only=True), bench.driver("other")
    snapshots = reference.snapshots()
    before = reference.weights()
    snapshots.save("before")
    reference.engine.load_full_weights(other.weights().items())
    snapshots.restore("before")
    found = differences(reference.weights(), before)
    bench.require_everywhere(found == "none", f"after an import, restored and saved weights: {found}")


CHECKS = (
    Check("forward_only/log_probs", (all_ranks(log_probs),), ("forward_only",)),
    Check("forward_only/refusal", (all_ranks(refusal),), ("forward_only",)),
    Check("forward_only/refreshed", (all_ranks(refreshed),), ("forward_only", "weight_import")),
    Check("forward_only/snapshot", (all_ranks(snapshot),), ("forward_only", "weight_import", "snapshots")),
)
