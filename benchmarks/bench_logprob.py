"""Log-probs over a large vocabulary, forward and backward: `linear_log_probs` against logits and log_softmax.

    peak_vs_naive   peak of memory above that of the inputs, as a share of what plain logits take; limit 0.15
    time_vs_naive   time of the processor as a share of that of plain logits; limit 1.2

Each run is a process of its own with one thread, so that its peak is its own. The two ways take turns, so that a slow
moment of the machine hits both; metrics are medians. `linear_log_probs` makes four matrix products where plain logits
take three, and spares itself fresh memory: the wider the model, the nearer its time comes to 4 / 3.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from verl_engine.engine.linear_log_probs import Entropy, linear_log_probs
from verl_engine.engine.output_from_logits import numbers_from_logits

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

VOCABULARY = 151_936
TOKENS = 2048
HIDDEN = 256
CHUNK = 256
LIMITS = {"peak_vs_naive": 0.15, "time_vs_naive": 1.2}


class Inputs(NamedTuple):
    """What an output layer gets."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor


class Run(NamedTuple):
    """What one run took."""

    seconds: float
    peak_bytes: float


def draw_inputs() -> Inputs:
    """Draw hidden states, weight and targets."""
    hidden = torch.randn(TOKENS, HIDDEN).requires_grad_()
    weight = torch.empty(VOCABULARY, HIDDEN).normal_(std=HIDDEN**-0.5).requires_grad_()
    return Inputs(hidden, weight, torch.randint(VOCABULARY, (TOKENS,)))


def run(way: str, entropy: Entropy, inputs: Inputs, answer: Connection) -> None:
    """Compute log-probs, entropy and their gradients once, and send how long it took and how much memory."""
    before = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    start = time.process_time()
    if way == "naive":
        found = numbers_from_logits(inputs.hidden @ inputs.weight.T, inputs.targets, 1.0, entropy)
    else:
        found = linear_log_probs(inputs.hidden, inputs.weight, inputs.targets, chunk=CHUNK, entropy=entropy)
    logp, second = found
    (logp.sum() if second is None or not second.requires_grad else logp.sum() + second.sum()).backward()
    seconds = time.process_time() - start
    answer.send(Run(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before))


def measure(way: str, entropy: Entropy, inputs: Inputs) -> Run:
    """Run in a process of its own; it shares the inputs with this one, and begins with a peak of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(way, entropy, inputs, sender))
    process.start()
    sender.close()  # or the end of a process that failed would go unnoticed
    found: Run = receiver.recv()
    process.join()
    return found


def median(runs: list[Run]) -> Run:
    """Return the median of each figure."""
    return Run(*(statistics.median(values) for values in zip(*runs, strict=True)))


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each way (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = draw_inputs()
    ways: dict[str, tuple[str, Entropy]] = {"naive": ("naive", "off"), "linear": ("linear", "off")}
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, (way, entropy) in ways.items():
            runs[name].append(measure(way, entropy, inputs))
    found = {name: median(values) for name, values in runs.items()}
    found["linear with entropy"] = measure("linear", "value", inputs)
    found["linear with entropy's gradient"] = measure("linear", "gradient", inputs)
    if not options.json:
        for name, (seconds, peak_bytes) in found.items():
            print(f"{name}: {seconds:.2f} s, {peak_bytes / 1e6:.0f} MB")
    naive = found["naive"]
    metrics = {}
    for suffix, name in (
        ("", "linear"),
        ("_with_entropy", "linear with entropy"),
        ("_with_entropy_gradient", "linear with entropy's gradient"),
    ):
        metrics[f"peak_vs_naive{suffix}"] = found[name].peak_bytes / naive.peak_bytes
        metrics[f"time_vs_naive{suffix}"] = found[name].seconds / naive.seconds
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
    missed = [f"{name}={metrics[name]:.3f} is above {limit}" for name, limit in LIMITS.items() if metrics[name] > limit]
    if missed:
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
