"""Checkpoints: a run that is resumed goes on as if it had never stopped."""

import threading
from contextlib import closing
from typing import Any, Final
from unittest import mock

import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.checkpoints.writer import CheckpointWriter
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, one_rank, refusal
from verl_engine.testing.conformance.driver import all_equal, differences
from verl_engine.testing.conformance.reference import furthest, make_sequences

SETTINGS: Final[dict[str, Any]] = {"warmup_steps": 3, "weight_decay": 0.1}
EXPECTED: Final = "expected.pt"
USER_STATE: Final = {"epoch": 1, "order": [3, 1, 2]}


def checkpoint_store(bench: Bench, keep_last: int | None = None) -> closing[CheckpointStore]:
    """Open the store of this check's folder."""
    return closing(CheckpointStore(bench.folder / "checkpoints", keep_last=keep_last, timeout_s=60.0))


def keep(bench: Bench, expected: Any) -> None:
    """Keep what a later phase is to find."""
    if bench.rank == 0:
        torch.save(expected, bench.folder / EXPECTED)


def train_and_save(bench: Bench) -> None:
    """Save after each of two steps, then make two more and keep their result."""
    driver = bench.driver(**SETTINGS)
    with checkpoint_store(bench) as store:
        for step in (0, 1):
            driver.train_on(step)
            store.save(driver.engine, step)
        driver.train_on(2, 3)
    keep(bench, driver.weights())


def resume(bench: Bench) -> None:
    """A fresh engine resumes and goes on bit for bit as the first would have."""
    found, expected = _resume(bench)
    bench.require_same(found, expected, "two steps after the resume")


def resume_elsewhere(bench: Bench) -> None:
    """On another number of ranks a resumed run goes on as the first would have, to 1e-6."""
    found, expected = _resume(bench)
    _, worst = furthest(found, expected)
    bench.require(
        worst <= 1e-6,  # noqa: PLR2004 - the order of additions differs
        f"two steps after the resume the weights differ by {worst:.3g}: {differences(found, expected)}",
    )


def _resume(bench: Bench) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    driver = bench.driver(**SETTINGS)
    with checkpoint_store(bench) as store:
        info = store.load(driver.engine)
    bench.require(info.step == 1, f"the latest checkpoint is said to be of step {info.step}, not 1")
    driver.train_on(2, 3)
    return driver.weights(), torch.load(bench.folder / EXPECTED)


def before_first_step(bench: Bench) -> None:
    """A checkpoint before the first step changes nothing, and can be resumed."""
    plain, saved, resumed = (bench.driver(**SETTINGS) for _ in range(3))
    with checkpoint_store(bench) as store:
        store.save(saved.engine, 0, wait=True)
        store.load(resumed.engine)
    for driver in (plain, saved, resumed):
        driver.train_on(0)
    for what, driver in (("after a save", saved), ("after a resume", resumed)):
        bench.require_same(driver.weights(), plain.weights(), f"the first step {what}")


def refusals(bench: Bench) -> None:
    """An empty folder and another model's checkpoint are refused with a WeightsError, and change nothing."""
    driver, other = bench.driver(), bench.driver("tied")
    before = driver.weights()
    with checkpoint_store(bench) as store:
        for what in ("an empty folder", "another model's checkpoint"):
            if what != "an empty folder":
                store.save(other.engine, 1, wait=True)
            message = refusal(WeightsError, lambda: store.load(driver.engine))
            bench.require(message is not None, f"resuming from {what} raised no WeightsError")
            bench.require_same(driver.weights(), before, f"{what} was refused, and changed the weights")


def in_background(bench: Bench) -> None:
    """Training that goes on while a checkpoint is written does not get into it."""
    # The rate rises in each step: a schedule that ran ahead shows in the second step after the resume.
    driver, twin, resumed = (bench.driver(warmup_steps=9, weight_decay=0.1) for _ in range(3))
    driver.train_on(0)
    twin.train_on(0)
    before = driver.weights()
    may_write = threading.Event()
    write = CheckpointWriter.write

    def write_late(writer: CheckpointWriter) -> None:
        may_write.wait(60.0)
        write(writer)

    with checkpoint_store(bench) as store:
        with mock.patch.object(CheckpointWriter, "write", write_late):
            store.save(driver.engine, 1)
            driver.train_on(1, 2)
            may_write.set()
            store.wait()
        store.load(resumed.engine)
    bench.require_same(resumed.weights(), before, "weights at the save and those in the checkpoint")
    for each in (resumed, twin):
        each.train_on(3, 4)
    why = "; optimizer or schedule leaked"
    bench.require_same(resumed.weights(), twin.weights(), "two steps after the resume", why)


def train_with_dropout(bench: Bench) -> None:
    """Save in the middle of a run with dropout, and keep what it ends with."""
    driver = bench.driver("dropout")
    with checkpoint_store(bench) as store:
        driver.train_on(0)
        store.save(driver.engine, 1, USER_STATE)
        driver.train_on(1, 2)
    keep(bench, driver.weights())


def random_numbers(bench: Bench) -> None:
    """A resumed run with dropout goes on bit for bit, and the caller's own state comes back."""
    driver = bench.driver("dropout")
    with checkpoint_store(bench) as store:
        info = store.load(driver.engine)
    bench.require(info.user_state == USER_STATE, f"user_state came back as {info.user_state}")
    bench.require(info.rng == "restored", f"random numbers were {info.rng}")
    driver.train_on(1, 2)
    expected = torch.load(bench.folder / EXPECTED)
    bench.require_same(driver.weights(), expected, "two steps with dropout after the resume")


def keep_last(bench: Bench) -> None:
    """Of several checkpoints the last ones are kept, and each holds the state of its own step."""
    driver, fresh = bench.driver(), bench.driver()
    expected = {}
    with checkpoint_store(bench, keep_last=2) as store:
        for step in range(3):
            driver.train_on(step)
            expected[step] = driver.weights()
            store.save(driver.engine, step)
        store.wait()
        bench.require(store.steps() == [1, 2], f"two should be kept, there are those of {store.steps()}")
        for step in (2, 1):
            store.load(fresh.engine, step)
            bench.require_same(fresh.weights(), expected[step], f"loaded after step {step}")


def buffers(bench: Bench) -> None:
    """Buffers that change in training, persistent or not, are saved and come back with the weights."""
    driver, fresh = bench.driver("buffered"), bench.driver("buffered")
    driver.train_on(0)
    sequences = make_sequences(5)
    before = driver.infer(sequences)
    bench.require(
        all_equal(before, bench.gather(before)[0]),
        "after a training step ranks give other log-probs than rank 0: their buffers differ, and a checkpoint holds "
        "one rank's; bring them together after each step",
    )
    with checkpoint_store(bench) as store:
        store.save(driver.engine, 1, wait=True)
        store.load(fresh.engine)
    bench.require(
        all_equal(fresh.infer(sequences), before),
        "after a resume log-probs differ: buffers that changed in training were lost",
    )


CHECKS = (
    Check("checkpoints/resume", (all_ranks(train_and_save), all_ranks(resume)), ("checkpoints",)),
    Check("checkpoints/before_first_step", (all_ranks(before_first_step),), ("checkpoints",)),
    Check("checkpoints/refusals", (all_ranks(refusals),), ("checkpoints",)),
    Check("checkpoints/in_background", (all_ranks(in_background),), ("checkpoints",)),
    Check("checkpoints/random_numbers", (all_ranks(train_with_dropout), all_ranks(random_numbers)), ("checkpoints",)),
    Check("checkpoints/keep_last", (all_ranks(keep_last),), ("checkpoints",)),
    Check("checkpoints/buffers", (all_ranks(buffers),), ("checkpoints", "dropout")),
    Check(
        "checkpoints/to_fewer_ranks",
        (all_ranks(train_and_save), one_rank(resume_elsewhere)),
        ("checkpoints", "resharding", "multi_rank"),
    ),
    Check(
        "checkpoints/to_more_ranks",
        (one_rank(train_and_save), all_ranks(resume_elsewhere)),
        ("checkpoints", "resharding", "multi_rank"),
    ),
)
