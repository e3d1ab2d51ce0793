"""Embedded rollout engine: against transformers' generate, and streaming against batch by batch. Last line: JSON.

Qwen3 with 4 layers and hidden size 256 and random weights, one thread, tokens per CPU-second. 16 and 64 prompts of 16
tokens, 64 new tokens each: ours gives a log-probability for each token; generate is not asked for any. Then 512 prompts
with log-normal lengths, the longest ten times the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import generate
from verl_async.rollout.interface import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES, PROMPT, NEW, VOCABULARY = (16, 64), 16, 64, 1024
REQUESTS, SLOTS, LONGEST = 512, 32, 240


def build_model(folder: Path) -> None:
    """Save the small random model."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of this process for one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def vs_generate(folder: Path, runs: int, batch: int) -> dict[str, float]:
    """Run both in turn, and compare medians."""
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu"), folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = torch.randint(1, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(max_new_tokens=NEW)
    requests = [GenerationRequest(tuple(row), sampling, (seed,)) for seed, row in enumerate(prompts.tolist())]

    def ours() -> None:
        assert all(len(result.token_ids) == NEW for result in generate(engine, requests))

    @torch.inference_mode()
    def theirs() -> None:
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
        )
        assert ids.shape == (batch, PROMPT + NEW)

    seconds = in_turn({"ours": ours, "hf": theirs}, runs)
    engine.close()
    return {
        f"vs_hf_generate_{batch}": seconds["hf"] / seconds["ours"],
        f"tokens_per_cpu_s_{batch}": batch * NEW / seconds["ours"],
        f"hf_tokens_per_cpu_s_{batch}": batch * NEW / seconds["hf"],
    }


def streaming_vs_batch(folder: Path, runs: int) -> dict[str, float]:
    """The same requests with long-tailed lengths: all at once into 32 slots, and 32 by 32, each batch to its end."""
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu", max_running=SLOTS), folder)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCABULARY, (REQUESTS, PROMPT)).tolist()
    requests = [
        GenerationRequest(tuple(prompt), SamplingParams(max_new_tokens=length), (seed,))
        for seed, (prompt, length) in enumerate(zip(prompts, long_tailed(rng), strict=True))
    ]

    def streaming() -> None:
        generate(engine, requests)

    def batch_by_batch() -> None:
        for start in range(0, REQUESTS, SLOTS):
            generate(engine, requests[start : start + SLOTS])

    seconds = in_turn({"streaming": streaming, "batch": batch_by_batch}, runs)
    engine.close()
    num_tokens = sum(request.sampling.max_new_tokens for request in requests)
    return {
        "streaming_vs_batch": seconds["batch"] / seconds["streaming"],
        "streaming_tokens_per_cpu_s": num_tokens / seconds["streaming"],
    }


def long_tailed(rng: np.random.Generator) -> list[int]:
    """Draw log-normal lengths of which the longest has ten times the mean."""
    normal = rng.standard_normal(REQUESTS)
    low, high = 0.0, 5.0
    lengths = np.ones(REQUESTS)
    for _ in range(50):  # the wider, the longer the longest
        sigma = (low + high) / 2
        lengths = np.exp(sigma * normal)
        low, high = (low, sigma) if lengths.max() > 10 * lengths.mean() else (sigma, high)
    return [max(1, round(LONGEST * float(length))) for length in lengths / lengths.max()]


def in_turn(functions: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median CPU-seconds of each, run in turn; a first run warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(runs + 1):
        for name, function in functions.items():
            seconds[name].append(cpu_seconds(function))
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each, after one to warm up")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder))
        metrics = streaming_vs_batch(Path(folder), max(1, options.runs // 3))
        for batch in BATCHES:
            metrics.update(vs_generate(Path(folder), options.runs, batch))
    metrics = {name: round(value, 3) for name, value in metrics.items()}
    if not options.json:
        for name, value in metrics.items():
            print(f"{name}: {value:g}")
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
