"""When gradients are reduced over the ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.micro_batch_pass import MicroBatchPass
from verl_engine.testing.conformance.accumulation import check_splits
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, SkipCheckError, all_ranks
from verl_engine.testing.conformance.collectives import ReductionCounter
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss


def hook_calls(bench: Bench) -> None:
    """The gradient-sync hook's context encloses each micro-batch once, and only the last is marked as last."""
    driver = bench.driver()
    events: list[str] = []

    @contextmanager
    def watch(is_last: bool) -> Iterator[None]:
        events.append(f"enter last={is_last}")
        with driver.host.gradient_sync(driver.engine, is_last):
            yield
        events.append("leave")

    batches = [
        PackedBatch.from_sequences(sequences, driver.engine.device.torch_device)
        for sequences in driver.micro_batches(make_sequences(6), 3)
    ]
    driver.engine.set_training(True)
    driver.engine.forward_backward(MicroBatchPass(batches, weighted_loss, watch))
    driver.engine.zero_grad()
    entered = [event for event in events if event != "leave"]
    expected = ["enter last=False", "enter last=False", "enter last=True"]
    bench.require(
        entered == expected and events.count("leave") == len(expected),
        f"three micro-batches entered engine_gradient_sync so: {events}",
    )


def last_only(bench: Bench) -> None:
    """By default the number of reductions does not grow with the number of micro-batches."""
    one, many = _reductions(bench)
    bench.require(
        one == many,
        f"{one} reductions over the data-parallel ranks with one micro-batch, but {many} with four: gradients are "
        "reduced before the last",
    )


def every_micro_batch(bench: Bench) -> None:
    """With ``gradient_sync: every_micro_batch`` each micro-batch is reduced, and the gradient is as right."""
    settings = bench.setting_of("every_micro_batch_sync")
    one, many = _reductions(bench, **settings)
    bench.require(many > one, f"{one} reductions with one micro-batch and {many} with four: the setting does nothing")
    check_splits(bench, **settings)


def _reductions(bench: Bench, **settings: Any) -> tuple[int, int]:
    driver = bench.driver(**settings)
    if driver.data_parallel_size == 1:
        raise SkipCheckError("all ranks hold the same data: there is nothing to reduce over data-parallel ranks")
    counts = []
    for num_micro_batches in (1, 4):
        micro_batches = driver.micro_batches(make_sequences(12), num_micro_batches)
        with ReductionCounter(driver.engine.data_parallel.group) as counter:
            driver.step(micro_batches)
        counts.append(counter.count)
    bench.require(counts[0] > 0, "no reduction over the data-parallel ranks was seen in a whole step")
    return counts[0], counts[1]


CHECKS = (
    Check("gradient_sync/hook_calls", (all_ranks(hook_calls),)),
    Check("gradient_sync/last_only", (all_ranks(last_only),), ("multi_rank", "last_micro_batch_sync")),
    Check("gradient_sync/every_micro_batch", (all_ranks(every_micro_batch),), ("multi_rank", "every_micro_batch_sync")),
)
