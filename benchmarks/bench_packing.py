"""What packing gains: tokens per CPU-second of forward and backward, one thread, float32, 64 lognormal sequences.

Three ways over the same model: every row padded to 512 (`packed_vs_padmax`); eight sequences at a time, in the order
they come, padded to the longest of them (`packed_vs_padmicro`); and the fsdp2 engine, packed and balanced. Only real
tokens count. `gemm_floor_fraction` is the fraction of this machine's own matrix-product rate that the engine reaches:
the least time that its products need, over the time it took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.plan import plan_micro_batches
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.validation import validate
from verl_engine.engine.micro_batch_pass import MicroBatchPass
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.ranks import run_ranks
from verl_engine.testing.tiny_models import tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_engine.engine.base import TokenOutput

LIMITS = {"packed_vs_padmax": 3.5, "packed_vs_padmicro": 2.5, "gemm_floor_fraction": 0.70}
VOCAB, LONGEST, HIDDEN, INNER, LAYERS = 2048, 512, 384, 1024, 2
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 64, "max_position_embeddings": LONGEST,
}  # fmt: skip


def draw_sequences() -> list[Sequence]:
    """Draw 64 sequences, about 117 tokens in the mean; all tokens but the first are in the loss."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(4.3, 1.0, 64).clip(8, LONGEST).astype(int)
    return [Sequence(random.integers(0, VOCAB, size), np.arange(size) > 0, {}) for size in lengths]


def negative_log_likelihood(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the loss tokens."""
    return -output.log_probs[batch.loss_positions].sum(), {}


def run_packed(folder: Path, sequences: list[Sequence]) -> Callable[[], None]:
    """Return the engine's forward and backward over all sequences."""
    host = BackendHost.load("fsdp2")
    section = {"backend": "fsdp2", "device": "cpu", "learning_rate": 1e-4, "logit_chunk": 1024}
    engine = host.create(validate(host.spec.config_class, section, at="engine"), folder, "actor")
    engine.set_training(True)
    (plan,) = plan_micro_batches([len(sequence) for sequence in sequences], 1, 1024)
    batches = [PackedBatch.from_sequences([sequences[index] for index in group]) for group in plan]

    def run() -> None:
        engine.forward_backward(MicroBatchPass(batches, negative_log_likelihood, lambda _: nullcontext()))
        engine.zero_grad()

    return run


def run_padded(folder: Path, sequences: list[Sequence], length: int | None) -> Callable[[], None]:
    """Return plain transformers' forward and backward, eight rows at a time.

    Args:
        folder: of the model.
        sequences: in the order they come.
        length: of each row; None for the longest of the eight.
    """
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    model.train()

    def run() -> None:
        for start in range(0, len(sequences), 8):
            rows = sequences[start : start + 8]
            width = length or max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, sequence in enumerate(rows):
                ids[row, : len(sequence)] = torch.from_numpy(sequence.token_ids)
                mask[row, : len(sequence)] = 1
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(log_probs * mask[:, 1:]).sum()).backward()
        model.zero_grad()

    return run


def flops(sequences: list[Sequence]) -> int:
    """Count the floating-point operations of the products in forward and backward (three times the forward's)."""
    linear = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER) + HIDDEN * VOCAB
    # Causal: half of all pairs; scores and weighted sum.
    attention = LAYERS * sum(2 * HIDDEN * len(sequence) ** 2 // 2 for sequence in sequences)
    return 3 * 2 * (linear * sum(map(len, sequences)) + attention)


def gemm_rate() -> float:
    """Measure floating-point operations a second of a matrix product that fits the model's sizes."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(8):
        start = time.process_time()
        left @ right
        times.append(time.process_time() - start)
    return 2 * 1024**3 / statistics.median(times)


def measure(_rank: int, folder: Path, rounds: int) -> dict[str, float]:
    """Let all take turns; return medians of CPU seconds, and of the rate of products."""
    sequences = draw_sequences()
    ways = {
        "packed": run_packed(folder, sequences),
        "padmicro": run_padded(folder, sequences, None),
        "padmax": run_padded(folder, sequences, LONGEST),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates = []
    ways["packed"]()  # warms up
    for turn in range(rounds):
        for name, run in ways.items():
            if turn and name == "padmax":
                continue  # takes longer than all else together
            rates.append(gemm_rate())
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {**{name: statistics.median(values) for name, values in seconds.items()}, "rate": statistics.median(rates)}


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=2, help="turns of each way; padmax has one (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    sequences = draw_sequences()
    num_tokens = sum(map(len, sequences))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Path(folder) / "model"
        config = transformers.Qwen3Config(**{**tiny_config(VOCAB), **SIZES})
        transformers.Qwen3ForCausalLM(config).save_pretrained(model)
        (found,) = run_ranks(measure, model, options.rounds, world_size=1)
    metrics = {
        "packed_vs_padmax": found["padmax"] / found["packed"],
        "packed_vs_padmicro": found["padmicro"] / found["packed"],
        "gemm_floor_fraction": flops(sequences) / found["rate"] / found["packed"],
        "packed_tokens_per_cpu_s": num_tokens / found["packed"],
        "gemm_gflops": found["rate"] / 1e9,
    }
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
    missed = [f"{name}={metrics[name]:.3f} is below {limit}" for name, limit in LIMITS.items() if metrics[name] < limit]
    if missed:
        sys.exit("; ".join(missed))


if __name__ == "__main__":
    main()
