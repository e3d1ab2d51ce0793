"""Moving to the CPU and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import make_sequences

if TYPE_CHECKING:
    from verl_engine.testing.conformance.bench import Bench


def there_and_back(bench: Bench) -> None:
    """Moving to the CPU and back, twice in a row too, changes neither weights nor what training makes of them."""
    moved, stayed = bench.driver(), bench.driver()
    for driver in (moved, stayed):
        driver.train(make_sequences(8, seed=0))
    for to_cpu in (True, True, False, False):
        moved.engine.move(to_cpu=to_cpu)
    found = differences(moved.weights(), stayed.weights())
    bench.require_everywhere(found == "none", f"after moving: {found}")
    for driver in (moved, stayed):
        driver.infer(make_sequences(3))
        for seed in (1, 2):
            driver.train(make_sequences(8, seed=seed))
    found = differences(moved.weights(), stayed.weights())
    bench.require_everywhere(found == "none", f"two steps after moving: {found}; optimizer state was lost or changed")


CHECKS = (Check("offload/there_and_back", (all_ranks(there_and_back),), ("offload",)),)
