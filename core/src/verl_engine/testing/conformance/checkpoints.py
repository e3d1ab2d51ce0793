"""Checkpoints: a run that is resumed goes on as if it had never stopped."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.checkpoints.writer import CheckpointWriter
from verl_engine.testing.conformance.check import Check, all_ranks, one_rank
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import furthest, make_sequences

if TYPE_CHECKING:
    from verl_engine.testing.conformance.bench import Bench
    from verl_engine.testing.conformance.driver import Driver

SETTINGS: Final[dict[str, Any]] = {"warmup_steps": 3, "weight_decay": 0.1}
EXPECTED: Final = "expected.pt"
USER_STATE: Final = {"epoch": 1, "order": [3, 1, 2]}


def _store(bench: Bench, keep_last: int | None = None) -> closing[CheckpointStore]:
    return closing(CheckpointStore(bench.folder / "checkpoints", keep_last=keep_last, timeout_s=60.0))


def _train(driver: Driver, *seeds: int) -> None:
    for seed in seeds:
        driver.train(make_sequences(8, seed=seed))


def _keep(bench: Bench, expected: Any) -> None:
    if bench.rank == 0:
        torch.save(expected, bench.folder / EXPECTED)


def train_and_save(bench: Bench) -> None:
    """Save after each of two steps, then make two more and keep their result."""
    driver = bench.driver(**SETTINGS)
    with _store(bench) as store:
        for step in (0, 1):
            _train(driver, step)
            store.save(driver.engine, step)
        _train(driver, 2, 3)
    _keep(bench, driver.weights())


def resume(bench: Bench) -> None:
    """A fresh engine resumes and goes on bit for bit as the first would have."""
    found, expected = _resume(bench)
    difference = differences(found, expected)
    bench.require_everywhere(difference == "none", f"two steps after the resume: {difference}")


def resume_elsewhere(bench: Bench) -> None:
    """On another number of ranks a resumed run goes on as the first would have, to 1e-6."""
    found, expected = _resume(bench)
    _, worst = furthest(found, expected)
    bench.require_everywhere(
        worst <= 1e-6,  # noqa: PLR2004 - the order of additions differs
        f"two steps after the resume the weights differ by {worst:.3g}: {differences(found, expected)}",
    )


def _resume(bench: Bench) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    driver = bench.driver(**SETTINGS)
    with _store(bench) as store:
        info = store.load(driver.engine)
    bench.require_everywhere(info.step == 1, f"the latest checkpoint is said to be of step {info.step}, not 1")
    _train(driver, 2, 3)
    return driver.weights(), torch.load(bench.folder / EXPECTED)


def before_first_step(bench: Bench) -> None:
    """A checkpoint before the first step changes nothing, and can be resumed."""
    plain, saved, resumed = (bench.driver(**SETTINGS) for _ in range(3))
    with _store(bench) as store:
        store.save(saved.engine, 0, wait=True)
        store.load(resumed.engine)
    for driver in (plain, saved, resumed):
        _train(driver, 0)
    for what, driver in (("after a save", saved), ("after a resume", resumed)):
        difference = differences(driver.weights(), plain.weights())
        bench.require_everywhere(difference == "none", f"the first step {what}: {difference}")


def refusals(bench: Bench) -> None:
    """An empty folder and another model's checkpoint are refused with a WeightsError, and change nothing."""
    driver, other = bench.driver(), bench.driver("tied")
    before = driver.weights()
    with _store(bench) as store:
        for what in ("an empty folder", "another model's checkpoint"):
            if what != "an empty folder":
                store.save(other.engine, 1, wait=True)
            is_refused = False
            try:
                store.load(driver.engine)
            except WeightsError:
                is_refused = True
            bench.require_everywhere(is_refused, f"resuming from {what} raised no WeightsError")
            found = differences(driver.weights(), before)
            bench.require_everywhere(found == "none", f"{what} was refused, and changed the weights: {found}")


def in_background(bench: Bench) -> None:
    """Training that goes on while a checkpoint is written does not get into it."""
    # The rate rises in each step: a schedule that ran ahead shows in the second step after the resume.
    driver, twin, resumed = (bench.driver(warmup_steps=9, weight_decay=0.1) for _ in range(3))
    _train(driver, 0)
    _train(twin, 0)
    before = driver.weights()
    may_write = threading.Event()
    write = CheckpointWriter.write

    def write_late(writer: CheckpointWriter) -> None:
        may_write.wait(60.0)
        write(writer)

    with _store(bench) as store:
        with mock.patch.object(CheckpointWriter, "write", write_late):
            store.save(driver.engine, 1)
            _train(driver, 1, 2)
            may_write.set()
            store.wait()
        store.load(resumed.engine)
    found = differences(resumed.weights(), before)
    bench.require_everywhere(found == "none", f"weights at the save and those in the checkpoint: {found}")
    for each in (resumed, twin):
        _train(each, 3, 4)
    found = differences(resumed.weights(), twin.weights())
    bench.require_everywhere(found == "none", f"two steps after the resume: {found}; optimizer or schedule leaked")


def train_with_dropout(bench: Bench) -> None:
    """Save in the middle of a run with dropout, and keep what it ends with."""
    driver = bench.driver("dropout")
    with _store(bench) as store:
        _train(driver, 0)
        store.save(driver.engine, 1, USER_STATE)
        _train(driver, 1, 2)
    _keep(bench, driver.weights())


def random_numbers(bench: Bench) -> None:
    """A resumed run with dropout goes on bit for bit, and the caller's own state comes back."""
    driver = bench.driver("dropout")
    with _store(bench) as store:
        info = store.load(driver.engine)
    bench.require_everywhere(info.user_state == USER_STATE, f"user_state came back as {info.user_state}")
    bench.require_everywhere(info.rng == "restored", f"random numbers were {info.rng}")
    _train(driver, 1, 2)
    found = differences(driver.weights(), torch.load(bench.folder / EXPECTED))
    bench.require_everywhere(found == "none", f"two steps with dropout after the resume: {found}")


def keep_last(bench: Bench) -> None:
    """Of several checkpoints the last ones are kept, and each holds the state of its own step."""
    driver, fresh = bench.driver(), bench.driver()
    expected = {}
    with _store(bench, keep_last=2) as store:
        for step in range(3):
            _train(driver, step)
            expected[step] = driver.weights()
            store.save(driver.engine, step)
        store.wait()
        bench.require_everywhere(store.steps() == [1, 2], f"two should be kept, there are those of {store.steps()}")
        for step in (2, 1):
            store.load(fresh.engine, step)
            found = differences(fresh.weights(), expected[step])
            bench.require_everywhere(found == "none", f"loaded after step {step}: {found}")


def buffers(bench: Bench) -> None:
    """Buffers that change in training, persistent or not, are saved and come back with the weights."""
    driver, fresh = bench.driver("buffered"), bench.driver("buffered")
    _train(driver, 0)
    sequences = make_sequences(5)
    before = driver.infer(sequences)
    bench.require_everywhere(
        _same(before, bench.gather(before)[0]),
        "after a training step ranks give other log-probs than rank 0: their buffers differ, and a checkpoint holds "
        "one rank's; bring them together after each step",
    )
    with _store(bench) as store:
        store.save(driver.engine, 1, wait=True)
        store.load(fresh.engine)
    bench.require_everywhere(
        _same(fresh.infer(sequences), before),
        "after a resume log-probs differ: buffers that changed in training were lost",
    )


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
