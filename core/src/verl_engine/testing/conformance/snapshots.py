"""Snapshots of weights on the CPU: their own, exact, complete."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Final

import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.snapshots.checksum import weights_checksum
from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal, require
from verl_engine.testing.conformance.driver import Driver, all_equal, differences
from verl_engine.testing.conformance.reference import make_sequences

_READER: Final = """
import pickle, sys
from verl_engine.engine.snapshots.shared import SnapshotReader
content = SnapshotReader(pickle.load(sys.stdin.buffer)).newest()
print(content.version, content.checksum())
"""


def independent(bench: Bench) -> None:
    """Training after a save does not change what was saved."""
    driver = bench.driver()
    snapshots = driver.snapshots()
    before = driver.weights()
    saved = snapshots.save("kept", version=3)
    copies = _copies(saved)
    bench.require(bool(saved.tensors) and saved.num_bytes > 0, "the snapshot holds no weights")
    bench.require((saved.tag, saved.version) == ("kept", 3), "the hook returned another snapshot")
    driver.train_on(0, 1)
    bench.require(differences(driver.weights(), before) != "none", "two steps trained nothing")
    _require_kept(bench, saved, copies, "training changed the snapshot: it aliases the live weights")


def exact(bench: Bench) -> None:
    """What is restored is what was saved, bit for bit, however often, after inference too; training goes on from it."""
    driver, twin = bench.driver(), bench.driver()
    snapshots = driver.snapshots()
    for each in (driver, twin):
        each.train(make_sequences(8, seed=0))
    before = driver.weights()
    driver.infer(make_sequences(3))
    snapshots.save("kept")
    snapshots.restore("kept")
    bench.require_same(driver.weights(), before, "restored at once")
    # Optimizer and schedule are not part of a snapshot: the twin trains on without one.
    for each in (driver, twin):
        each.train(make_sequences(8, seed=1))
    bench.require_same(driver.weights(), twin.weights(), "after a save and a further step")
    for _ in range(2):
        driver.train(make_sequences(8, seed=2))
        driver.infer(make_sequences(3))
        snapshots.restore("kept")
        bench.require_same(driver.weights(), before, "restored after training")
    snapshots.save("kept")  # into the memory of the first
    bench.require_same(driver.weights(), before, "saved again")


def swapped(bench: Bench) -> None:
    """Other weights inside ``swapped``; the former ones come back, after an exception too."""
    driver = bench.driver()
    snapshots = driver.snapshots()
    first = driver.weights()
    snapshots.save("first")
    driver.train(make_sequences(8))
    second = driver.weights()
    with snapshots.swapped("first"):
        bench.require_same(driver.weights(), first, "inside swapped")
    bench.require_same(driver.weights(), second, "after swapped")
    with suppress(ZeroDivisionError), snapshots.swapped("first"):
        raise ZeroDivisionError
    bench.require_same(driver.weights(), second, "after an exception inside swapped")


def tags(bench: Bench) -> None:
    """Several tags do not disturb each other; an unknown one is refused."""
    driver = bench.driver()
    snapshots = driver.snapshots()
    kept = {}
    for seed in range(2):
        kept[str(seed)] = driver.weights()
        snapshots.save(str(seed))
        driver.train(make_sequences(8, seed=seed))
    for tag in ("0", "1", "0"):
        snapshots.restore(tag)
        bench.require_same(driver.weights(), kept[tag], f"tag {tag} restored")
    snapshots.drop("0")
    message = refusal(WeightsError, lambda: snapshots.restore("0"))
    require(message is not None, "restoring a tag that was dropped silently does nothing")


def buffers(bench: Bench) -> None:
    """Buffers that change in training, persistent or not, are saved and restored with the weights."""
    driver = bench.driver("buffered")
    snapshots = driver.snapshots()
    sequences = make_sequences(5)
    driver.train(make_sequences(8, seed=0))
    before = driver.infer(sequences)
    snapshots.save("kept")
    driver.train(make_sequences(8, seed=1))
    changed = driver.infer(sequences)
    bench.require(not all_equal(before, changed), "a training step changed no log-prob")
    snapshots.restore("kept")
    bench.require(
        all_equal(driver.infer(sequences), before),
        "after a restore log-probs differ from those at the save: buffers that changed in training were lost",
    )


def offloaded(bench: Bench) -> None:
    """A snapshot taken, or restored, while the weights are on the CPU is as independent and exact."""
    driver = bench.driver()
    snapshots = driver.snapshots()
    before = driver.weights()
    driver.engine.move(to_cpu=True)
    saved = snapshots.save("kept")
    copies = _copies(saved)
    driver.engine.move(to_cpu=False)
    driver.train(make_sequences(8))
    _require_kept(
        bench, saved, copies, "training changed a snapshot taken while offloaded: it aliases the live weights"
    )
    driver.engine.move(to_cpu=True)
    snapshots.restore("kept")
    driver.engine.move(to_cpu=False)
    bench.require_same(driver.weights(), before, "restored while offloaded")
    driver.train(make_sequences(8))
    _require_kept(bench, saved, copies, "the restore made the snapshot and the live weights one")


def never_stale(bench: Bench) -> None:
    """A save copies nothing while nothing changes, and all of it after a step, an import, a move or a restore."""
    driver = bench.driver()
    snapshots = driver.snapshots()
    snapshots.save("start")
    ways: dict[str, Callable[[], object]] = {
        "a training step": lambda: driver.train(make_sequences(8)),
        "a restore": lambda: snapshots.restore("start"),
        "inference and a step": lambda: (driver.infer(make_sequences(3)), driver.train(make_sequences(8))),
    }
    if "weight_import" not in bench.gaps:
        # One number of all: neither a sample of the values nor the version counters of sharded tensors need show it.
        other = {name: tensor.clone() for name, tensor in driver.weights().items()}
        max(other.values(), key=torch.numel)[1, 1] += 1
        ways = {"an import of one changed number": lambda: driver.engine.load_full_weights(other.items()), **ways}
    if "offload" not in bench.gaps:
        ways["a move to the CPU and back"] = lambda: _there_and_back(driver)
    for what, change in ways.items():
        snapshots.save("kept")
        change()
        after = driver.weights()
        for _ in range(2):  # nothing changes before the second
            snapshots.save("kept")
        snapshots.restore("start")
        snapshots.restore("kept")
        bench.require_same(driver.weights(), after, f"saved after {what}, and restored")


def limit(bench: Bench) -> None:
    """What would go beyond snapshot_limit_bytes is refused with a WeightsError, and what was kept stays."""
    size = bench.driver().snapshots().save("kept").num_bytes
    driver = bench.driver(snapshot_limit_bytes=size + size // 2 + 4096)
    snapshots = driver.snapshots()
    before = driver.weights()
    snapshots.save("kept")
    driver.train(make_sequences(8))
    bench.require(
        refusal(WeightsError, lambda: snapshots.save("more")) is not None,
        "a second snapshot was kept although engine.snapshot_limit_bytes has no room for it; "
        "engine_copy_weights_to_cpu must fill the snapshot by snapshot.store()",
    )
    snapshots.restore("kept")
    bench.require_same(driver.weights(), before, "restored after another snapshot was refused")


def shared(bench: Bench) -> None:
    """With ``snapshot_memory: shared`` another process maps the snapshot, and reads the same weights."""
    driver = bench.driver(snapshot_memory="shared")
    with closing(driver.snapshots()) as snapshots:
        snapshots.save("kept", version=1)
        driver.train(make_sequences(8))
        saved = snapshots.save("kept", version=2)
        found = expected = f"2 {weights_checksum(saved.tensors)}"
        refusal = ""
        try:
            handle = pickle.dumps(snapshots.handle("kept"))
            found = subprocess.run(  # noqa: S603 - our own Python
                [sys.executable, "-c", _READER], input=handle, capture_output=True, check=True
            ).stdout.decode()
        except WeightsError as error:
            refusal = str(error)
        except subprocess.CalledProcessError as error:
            refusal = error.stderr.decode()
    bench.require(not refusal, f"another process cannot read the snapshot: {refusal}")
    bench.require(found.strip() == expected, "another process reads other weights than were saved")


def _copies(saved: WeightSnapshot) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in saved.tensors.items()}


def _require_kept(bench: Bench, saved: WeightSnapshot, copies: dict[str, torch.Tensor], what: str) -> None:
    bench.require_same(saved.tensors, copies, what)


def _there_and_back(driver: Driver) -> None:
    driver.engine.move(to_cpu=True)
    driver.engine.move(to_cpu=False)


CHECKS = (
    Check("snapshots/independent", (all_ranks(independent),), ("snapshots",)),
    Check("snapshots/exact", (all_ranks(exact),), ("snapshots",)),
    Check("snapshots/swapped", (all_ranks(swapped),), ("snapshots",)),
    Check("snapshots/tags", (all_ranks(tags),), ("snapshots",)),
    Check("snapshots/buffers", (all_ranks(buffers),), ("snapshots", "dropout")),
    Check("snapshots/offloaded", (all_ranks(offloaded),), ("snapshots", "offload")),
    Check("snapshots/never_stale", (all_ranks(never_stale),), ("snapshots",)),
    Check("snapshots/limit", (all_ranks(limit),), ("snapshots",)),
    Check("snapshots/shared", (all_ranks(shared),), ("snapshots",)),
)
