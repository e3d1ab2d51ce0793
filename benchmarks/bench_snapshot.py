"""Saving and restoring 2 GB of weights in 310 tensors, against copying as many bytes from one flat buffer to another.

The tensors have the shapes of a Qwen3 of 28 layers in float32. They lie side by side in one buffer, so that the plain
copy goes from and to the very memory that a save and a restore use: where the system put it matters more than all else.
What is compared is measured in turn, so that a slow moment of the machine hits all of it; ratios are of processor time,
medians over the rounds. `vs_clone_each_time` compares with dropping the former copies and making new ones by
``tensor.cpu().clone()``, in memory that comes fresh from the system each time, as in a process that needs it for other
things meanwhile. It should be 6 at least. No save is faster than the plain copy, though, and where that is not even 6.3
times as fast as fresh clones (`memcpy_vs_clone_each_time`: slow memory, or a system that gives out pages fast), 95% of
what it reaches is asked for. Exits with 1 if a figure misses its limit. One thread. Takes 6 GB, and 2 GB of shared
memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pickle
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from verl_engine import BackendHost, BackendSpec, Device, EngineConfig, hookimpl
from verl_engine.engine.module_engine import ModuleEngine
from verl_engine.engine.snapshots.checksum import spread_sample
from verl_engine.engine.snapshots.manager import Snapshots
from verl_engine.engine.snapshots.shared import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput
    from verl_engine.engine.temperature import Temperature

NUM_BYTES: Final = 2_000_000_000
LAYERS: Final = 28
WIDTH: Final = 1024
ROUNDS: Final = 9
BUDGET_S: Final = 18.0
"""Rounds end after this time; there are at least three."""
ATTACHMENTS: Final = 9
M_MMAP_THRESHOLD: Final = -3
"""Of glibc's mallopt."""
AT_LEAST: Final = {"save_vs_memcpy": 0.85, "restore_vs_memcpy": 0.85}
CLONE_AT_LEAST: Final = 6.0
CLONE_SHARE: Final = 0.95
AT_MOST: Final = {"peak_vs_weights": 1.05, "attach_ms": 5.0}


class Model(torch.nn.Module):
    """Weights only."""

    def __init__(self) -> None:
        """Fill the layers as Qwen3-0.6B has them, and as many rows of an embedding as 2 GB leave room for."""
        super().__init__()
        hidden = (WIDTH, 3 * WIDTH)
        layer = [(2 * WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (128,), (128,)]
        layer += [hidden[::-1], hidden[::-1], hidden, (WIDTH,), (WIDTH,)]
        shapes = [shape for _ in range(LAYERS) for shape in layer] + [(WIDTH,)]
        rows = (NUM_BYTES // 4 - sum(torch.Size(shape).numel() for shape in shapes)) // WIDTH
        shapes = [(rows, WIDTH), *shapes]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = zip(torch.ones(sum(sizes)).split(sizes), shapes, strict=True)
        self.weights = torch.nn.ParameterList(part.view(shape) for part, shape in parts)


class WeightsEngine(ModuleEngine):
    """An engine that only has weights."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Never called here."""
        raise NotImplementedError

    def clip_gradients(self) -> torch.Tensor:
        """Never called here."""
        raise NotImplementedError


@hookimpl
def engine_create(config: EngineConfig) -> WeightsEngine:
    """Make the engine."""
    return WeightsEngine(config, Device("cpu"), Model())


def make_host() -> BackendHost:
    """Host a backend of the functions above."""
    module = ModuleType("bench_hooks")
    vars(module)["engine_create"] = engine_create
    vars(module)["SPEC"] = BackendSpec("bench", EngineConfig, ("cpu",))
    return BackendHost.from_module(module)


class Taken(NamedTuple):
    """Seconds of one call."""

    wall: float
    processor: float
    """Of this thread: without the time in which other work had the core."""


def seconds(function: Callable[[], object]) -> Taken:
    """Time one call."""
    wall, processor = time.perf_counter(), time.thread_time()
    function()
    return Taken(time.perf_counter() - wall, time.thread_time() - processor)


def resident_bytes() -> int:
    """Return what this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def peak_of_first_save(snapshots: Snapshots) -> int:
    """Save, and return by how many bytes the process grew at most; it has never been larger before."""
    before = resident_bytes()
    snapshots.save("kept")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def time_copies(engine: WeightsEngine, snapshots: Snapshots) -> dict[str, list[Taken]]:
    """Time all ways in turn, round after round."""
    flat, kept = (
        torch.empty(0).set_(next(iter(weights)).untyped_storage())
        for weights in (engine.parameters.values(), snapshots.save("kept").tensors.values())
    )
    assert flat.shape == kept.shape, "the slot has gaps"
    clones: list[torch.Tensor] = []

    def save() -> None:
        engine.note_weights_changed()
        snapshots.save("kept")

    def clone() -> None:
        clones.clear()
        clones.extend(tensor.cpu().clone() for _, tensor in engine.local_weights())

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: kept.copy_(flat),
        "save": save,
        "memcpy_back": lambda: flat.copy_(kept),
        "restore": lambda: snapshots.restore("kept"),
        "unchanged": lambda: snapshots.save("kept"),  # right after the restore
        "clone": clone,
    }
    times: dict[str, list[Taken]] = {name: [] for name in ways}
    # glibc keeps freed memory below a size that it raises itself; fixed, what is freed goes back to the system.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    start = time.monotonic()
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            taken = seconds(way)
            if number:  # the first warms up
                times[name].append(taken)
        if number > 2 and time.monotonic() - start > BUDGET_S:  # noqa: PLR2004 - three rounds
            break
    return times


def attach(handle: bytes) -> None:
    """In another process: time how long it takes from the handle to all tensors."""
    found = pickle.loads(handle)  # noqa: S301 - from the process that started this one
    torch.set_num_threads(1)
    times = [seconds(lambda: SnapshotReader(found).newest()) for _ in range(ATTACHMENTS)]
    content = SnapshotReader(found).newest()
    print(json.dumps({"times": times, "sample": spread_sample(content.tensors).tolist()}))


def time_attachments(snapshots: Snapshots) -> list[Taken]:
    """Save into shared memory, and let another process attach."""
    saved = snapshots.save("shared")
    handle = pickle.dumps(snapshots.handle("shared"))
    child = subprocess.run(  # noqa: S603 - this script
        [sys.executable, __file__, "--attach"], input=handle, capture_output=True, check=False
    )
    if child.returncode:
        raise SystemExit(f"the process that attaches failed:\n{child.stderr.decode()}")
    found: dict[str, Any] = json.loads(child.stdout)
    if found["sample"] != spread_sample(saved.tensors).tolist():
        raise SystemExit("the process that attached read other weights")
    return [Taken(*times) for times in found["times"]]


def measure() -> dict[str, float]:
    """Return all metrics."""
    torch.set_num_threads(1)
    host = make_host()
    config = EngineConfig(backend="bench", device="cpu")
    engine: Any = host.create(config, Path(), "actor")
    weights = [tensor for _, tensor in engine.local_weights()]
    num_bytes = sum(tensor.nbytes for tensor in weights)
    snapshots = Snapshots(host, engine)
    peak = peak_of_first_save(snapshots)
    times = time_copies(engine, snapshots)
    snapshots.close()
    shared = Snapshots(host, engine, "shared")
    try:
        attachments = time_attachments(shared)
    finally:
        shared.close()
    medians = {name: statistics.median(taken.wall for taken in values) for name, values in times.items()}

    def ratio(over: str, under: str) -> float:
        return statistics.median(a.processor / b.processor for a, b in zip(times[over], times[under], strict=True))

    return {
        "save_vs_memcpy": ratio("memcpy", "save"),
        "restore_vs_memcpy": ratio("memcpy_back", "restore"),
        "peak_vs_weights": peak / num_bytes,
        "vs_clone_each_time": ratio("clone", "save"),
        "memcpy_vs_clone_each_time": ratio("clone", "memcpy"),
        "attach_ms": statistics.median(taken.wall for taken in attachments) * 1e3,
        "attach_first_ms": attachments[0].wall * 1e3,
        "attach_processor_ms": statistics.median(taken.processor for taken in attachments) * 1e3,
        "unchanged_ms": medians["unchanged"] * 1e3,
        **{
            f"{name}_gb_per_s": num_bytes / medians[name] / 1e9
            for name in ("memcpy", "memcpy_back", "save", "restore", "clone")
        },
        "num_tensors": len(weights),
        "num_bytes": num_bytes,
        "rounds": len(times["save"]),
    }


def missed(metrics: dict[str, float]) -> list[str]:
    """Name the metrics that miss their limits."""
    reachable = min(CLONE_AT_LEAST, CLONE_SHARE * metrics["memcpy_vs_clone_each_time"])
    least = {**AT_LEAST, "vs_clone_each_time": reachable}
    low = [f"{name}={metrics[name]:.3f} is below {limit:.3g}" for name, limit in least.items() if metrics[name] < limit]
    high = [f"{name}={metrics[name]:.3f} is above {limit}" for name, limit in AT_MOST.items() if metrics[name] > limit]
    return low + high


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--attach", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attach:
        attach(sys.stdin.buffer.read())
        return
    metrics = measure()
    if not options.json:
        for name, value in metrics.items():
            print(f"{name}: {value:.3f}")
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
    wrong = missed(metrics)
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
