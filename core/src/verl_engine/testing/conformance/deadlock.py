"""What must not leave ranks waiting for each other. Every check has a time limit; these go where it is easy to hang."""

from verl_engine.contract.errors import BatchError
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal
from verl_engine.testing.conformance.reference import make_sequences


def uneven_micro_batches(bench: Bench) -> None:
    """Different numbers of micro-batches are refused on every rank, and the engine can go on."""
    driver = bench.driver()
    rank = driver.engine.data_parallel.rank
    if driver.data_parallel_size > 1:
        message = refusal(BatchError, lambda: driver.step([make_sequences(1) for _ in range(rank + 1)]))
        bench.require(message is not None, "uneven numbers of micro-batches were not refused")
    message = refusal(BatchError, lambda: driver.step([[]]))
    bench.require(message is not None, "a global batch without loss tokens was not refused")
    driver.train(make_sequences(8))


def idle_ranks(bench: Bench) -> None:
    """Ranks without a single sequence take part in training, inference, export and saving."""
    driver = bench.driver()
    sequences = make_sequences(4) if driver.engine.data_parallel.rank == 0 else []
    for _ in range(2):
        driver.infer(sequences)
        driver.step([sequences[:1], sequences[1:2], sequences[2:3], sequences[3:]])
    driver.engine.save_pretrained(bench.folder / "saved")
    weights = driver.weights()
    bench.require(all(bool(tensor.isfinite().all()) for tensor in weights.values()), "weights are not finite")


CHECKS = (
    Check("deadlock/uneven_micro_batches", (all_ranks(uneven_micro_batches),)),
    Check("deadlock/idle_ranks", (all_ranks(idle_ranks),), ("multi_rank",)),
)
