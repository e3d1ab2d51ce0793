"""Moving to the CPU and back: each part alone and all together, between steps and between micro-batches."""

from dataclasses import dataclass
from typing import Final

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.base import Engine, TokenOutput
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks
from verl_engine.testing.conformance.checkpoints import EXPECTED, checkpoint_store, keep
from verl_engine.testing.conformance.driver import Driver, all_equal
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss

PARTS: Final = ("parameters", "gradients", "optimizer")


def there_and_back(bench: Bench) -> None:
    """Moving to the CPU and back, twice in a row too, changes neither weights nor what training makes of them."""
    moved, stayed = _two_trained(bench)
    for to_cpu in (True, True, False, False):
        moved.engine.move(to_cpu=to_cpu)
    bench.require_same(moved.weights(), stayed.weights(), "after moving")
    for driver in (moved, stayed):
        driver.infer(make_sequences(3))
        driver.train_on(1, 2)
    bench.require_same(
        moved.weights(), stayed.weights(), "two steps after moving", "; optimizer state was lost or changed"
    )


def each_part(bench: Bench) -> None:
    """Each part moves alone; meanwhile weights are exported as they are, and inference needs the parameters only."""
    moved, stayed = _two_trained(bench)
    sequences = make_sequences(4)
    for seed, part in enumerate(PARTS, start=1):
        _move(moved.engine, part, to_cpu=True)
        bench.require_same(moved.weights(), stayed.weights(), f"while the {part} were away")
        if part != "parameters":
            is_equal = all_equal(moved.infer(sequences), stayed.infer(sequences))
            bench.require(is_equal, f"log-probs differ while only the {part} were away")
        _move(moved.engine, part, to_cpu=False)
        for driver in (moved, stayed):
            driver.train(make_sequences(8, seed=seed))
        bench.require_same(moved.weights(), stayed.weights(), f"a step after the {part} alone were moved")
    moved.engine.move(to_cpu=True)
    for part in reversed(PARTS):
        _move(moved.engine, part, to_cpu=False)
    for driver in (moved, stayed):
        driver.train(make_sequences(8, seed=9))
    bench.require_same(moved.weights(), stayed.weights(), "a step after the parts came back one by one")


def gradients_between_micro_batches(bench: Bench) -> None:
    """Gradients that are moved in the middle of an accumulation come back: the step is as without."""
    moved, stayed = _two_trained(bench)
    sequences = make_sequences(12, seed=1)
    moved.step(moved.micro_batches(sequences, 3), _MovesGradients(moved.engine))
    stayed.step(stayed.micro_batches(sequences, 3))
    bench.require_same(moved.weights(), stayed.weights(), "a step whose gradients were moved between micro-batches")


def save_while_away(bench: Bench) -> None:
    """Save with everything on the CPU, come back, go on, and keep the result."""
    driver = bench.driver()
    driver.train(make_sequences(8, seed=0))
    driver.engine.move(to_cpu=True)
    with checkpoint_store(bench) as store:
        store.save(driver.engine, 1)
    driver.engine.move(to_cpu=False)
    driver.train(make_sequences(8, seed=1))
    keep(bench, driver.weights())


def resume_what_was_saved_away(bench: Bench) -> None:
    """A checkpoint written while everything is on the CPU is resumed bit for bit."""
    driver = bench.driver()
    with checkpoint_store(bench) as store:
        store.load(driver.engine)
    driver.train(make_sequences(8, seed=1))
    bench.require_same(driver.weights(), torch.load(bench.folder / EXPECTED), "a step after the resume")


@dataclass(frozen=True)
class _MovesGradients:
    """A loss that moves the gradients there are, and brings them back."""

    engine: Engine

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for to_cpu in (True, False):
            _move(self.engine, "gradients", to_cpu=to_cpu)
        return weighted_loss(output, batch)


def _two_trained(bench: Bench) -> tuple[Driver, Driver]:
    drivers = bench.driver(), bench.driver()
    for driver in drivers:
        driver.train(make_sequences(8, seed=0))
    return drivers


def _move(engine: Engine, part: str, *, to_cpu: bool) -> None:
    engine.move(to_cpu=to_cpu, **{name: name == part for name in PARTS})


CHECKS = (
    Check("offload/there_and_back", (all_ranks(there_and_back),), ("offload",)),
    Check("offload/each_part", (all_ranks(each_part),), ("offload",)),
    Check("offload/gradients_between_micro_batches", (all_ranks(gradients_between_micro_batches),), ("offload",)),
    Check(
        "offload/checkpoint",
        (all_ranks(save_while_away), all_ranks(resume_what_was_saved_away)),
        ("offload", "checkpoints"),
    ),
)
