"""What the modes of gradient synchronisation cost on two ranks, in a step of 8 micro-batches: calls, bytes, CPU time.

Collectives are counted at torch's dispatcher; a call counts with the bytes of the whole tensor that it gathers or
reduces. `bytes_vs_every` is the mode that keeps parameters gathered, over reducing and gathering at each micro-batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.validation import validate
from verl_engine.engine.train_step import train_step
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.ranks import run_ranks
from verl_engine.testing.tiny_models import tiny_config

if TYPE_CHECKING:
    from verl_engine.engine.base import Engine, TokenOutput

MICRO_BATCHES = 8
TOKENS = 16
VOCAB = 4096
LIMIT = 0.40
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 64,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "every": {"gradient_sync": "every_micro_batch"},
    "last": {"gradient_sync": "last_micro_batch"},
    "kept": {"gradient_sync": "last_micro_batch", "keep_unsharded": True},
    "every_kept": {"gradient_sync": "every_micro_batch", "keep_unsharded": True},
}
DTYPES = {"float32": "", "bfloat16": "_bf16"}
GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"


class Collectives(TorchDispatchMode):
    """Counts the calls and the bytes of fully_shard's collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch annotates it in part
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at one operation."""
        del types
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in (GATHER, REDUCE):
            whole = args[0] if name == GATHER else args[1]
            self.calls[name] += 1
            self.bytes += whole.numel() * whole.element_size()
        return func(*args, **(kwargs or {}))


def negative_log_likelihood(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the loss tokens."""
    return -output.log_probs[batch.loss_positions].sum(), {}


def draw_batches(rank: int) -> list[PackedBatch]:
    """Draw micro-batches of one sequence each."""
    random = np.random.default_rng(rank)
    mask = np.arange(TOKENS) > 0
    return [
        PackedBatch.from_sequences([Sequence(random.integers(0, VOCAB, TOKENS), mask, {})])
        for _ in range(MICRO_BATCHES)
    ]


def make_engine(folder: Path, **settings: Any) -> tuple[BackendHost, Engine]:
    """Build an engine in one of the modes."""
    host = BackendHost.load("fsdp2")
    section = {"backend": "fsdp2", "device": "cpu", "learning_rate": 1e-4, **settings}
    return host, host.create(validate(host.spec.config_class, section, at="engine"), folder, "actor")


def count(rank: int, folder: Path, dtype: str) -> dict[str, tuple[int, int, int, int]]:
    """Return for each mode gathers, reductions, bytes, and the reductions of a step of one micro-batch."""
    batches, found = draw_batches(rank), {}
    for mode, settings in MODES.items():
        host, engine = make_engine(folder, param_dtype=dtype, **settings)
        counters = []
        for own in (batches, batches[:1]):
            with Collectives() as counter:
                train_step(host, engine, own, negative_log_likelihood)
            counters.append(counter)
        many, one = counters
        found[mode] = (many.calls[GATHER], many.calls[REDUCE], many.bytes, one.calls[REDUCE])
    return found


def measure(rank: int, folder: Path, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Count in both dtypes, then let the modes take turns; return the counts and the CPU seconds of each turn."""
    counts = {dtype: count(rank, folder, dtype) for dtype in DTYPES}
    batches = draw_batches(rank)
    engines = {mode: make_engine(folder, **settings) for mode, settings in MODES.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(rounds + 1):
        for mode, (host, engine) in engines.items():
            dist.barrier()
            start = time.process_time()
            train_step(host, engine, batches, negative_log_likelihood)
            if turn:  # the first warms up
                seconds[mode].append(time.process_time() - start)
    return counts, seconds


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**tiny_config(VOCAB), **SIZES}))
        model.save_pretrained(folder)
        metrics["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        results = run_ranks(measure, Path(folder), options.rounds, timeout_s=600)
        for dtype, suffix in DTYPES.items():
            counts = results[0][0][dtype]
            for mode, (gathers, reductions, num_bytes, _) in counts.items():
                metrics[f"gathers_{mode}{suffix}"] = gathers
                metrics[f"reductions_{mode}{suffix}"] = reductions
                metrics[f"mb_{mode}{suffix}"] = num_bytes / 1e6
            metrics[f"reductions_of_one_pass{suffix}"] = counts["last"][3]
            metrics[f"bytes_vs_every{suffix}"] = counts["kept"][2] / counts["every"][2]
    seconds = {
        mode: [sum(parts) for parts in zip(*(turns[mode] for _, turns in results), strict=True)] for mode in MODES
    }
    for mode, values in seconds.items():
        ratios = [own / every for own, every in zip(values, seconds["every"], strict=True)]
        metrics[f"cpu_{mode}"] = statistics.median(ratios)
        if not options.json:
            print(f"{mode}: {statistics.median(values):.3f} CPU s a step on both ranks")
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
    for suffix in DTYPES.values():
        one = metrics[f"reductions_of_one_pass{suffix}"]
        for mode in ("last", "kept"):
            found = metrics[f"reductions_{mode}{suffix}"]
            if found != one:
                sys.exit(f"reductions_{mode}{suffix}={found:.0f} are not those of one pass, {one:.0f}")
        if metrics[f"bytes_vs_every{suffix}"] > LIMIT:
            sys.exit(f"bytes_vs_every{suffix}={metrics[f'bytes_vs_every{suffix}']:.3f} is above {LIMIT}")


if __name__ == "__main__":
    main()
