"""Checkpoints: a run that is resumed goes on as if it had never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoint import load_checkpoint, save_checkpoint
from verl_engine.testing.conformance.check import Check, all_ranks, one_rank
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import furthest, make_sequences

if TYPE_CHECKING:
    from verl_engine.testing.conformance.bench import Bench
    from verl_engine.testing.conformance.driver import Driver

SETTINGS: Final[dict[str, Any]] = {"warmup_steps": 3, "weight_decay": 0.1}
EXPECTED: Final = "expected.pt"


def _train(driver: Driver, *seeds: int) -> None:
    for seed in seeds:
        driver.train(make_sequences(8, seed=seed))


def train_and_save(bench: Bench) -> None:
    """Save after two steps, over an earlier save, then make two more and keep their result."""
    driver = bench.driver(**SETTINGS)
    _train(driver, 0)
    save_checkpoint(driver.engine, bench.folder / "step")
    _train(driver, 1)
    save_checkpoint(driver.engine, bench.folder / "step")
    _train(driver, 2, 3)
    expected = driver.weights()
    if bench.rank == 0:
        torch.save(expected, bench.folder / EXPECTED)


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
    load_checkpoint(driver.engine, bench.folder / "step")
    _train(driver, 2, 3)
    return driver.weights(), torch.load(bench.folder / EXPECTED)


def before_first_step(bench: Bench) -> None:
    """A checkpoint before the first step changes nothing, and can be resumed."""
    plain, saved, resumed = (bench.driver(**SETTINGS) for _ in range(3))
    save_checkpoint(saved.engine, bench.folder / "step")
    load_checkpoint(resumed.engine, bench.folder / "step")
    for driver in (plain, saved, resumed):
        _train(driver, 0)
    for what, driver in (("after a save", saved), ("after a resume", resumed)):
        difference = differences(driver.weights(), plain.weights())
        bench.require_everywhere(difference == "none", f"the first step {what}: {difference}")


def nothing_there(bench: Bench) -> None:
    """A folder without a whole checkpoint is refused with a WeightsError."""
    driver = bench.driver()
    is_refused = False
    try:
        load_checkpoint(driver.engine, bench.folder)
    except WeightsError:
        is_refused = True
    bench.require_everywhere(is_refused, "resuming from an empty folder raised no WeightsError")


CHECKS = (
    Check("checkpoints/resume", (all_ranks(train_and_save), all_ranks(resume)), ("checkpoints",)),
    Check("checkpoints/before_first_step", (all_ranks(before_first_step),), ("checkpoints",)),
    Check("checkpoints/nothing_there", (all_ranks(nothing_there),), ("checkpoints",)),
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
