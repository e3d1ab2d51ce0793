"""Embedded rollout engine against transformers' generate: tokens per CPU-second, one thread. Last line: a JSON object.

Qwen3 with 4 layers and hidden size 256 and random weights; 64 prompts of 16 tokens, 64 new tokens each. Ours gives a
log-probability for each token; generate is not asked for any.
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

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import generate
from verl_async.rollout.interface import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, PROMPT, NEW, VOCABULARY = 64, 16, 64, 1024


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


def measure(folder: Path, runs: int) -> dict[str, float]:
    """Run both in turn, and compare medians."""
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu"), folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = torch.randint(1, VOCABULARY, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
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
        assert ids.shape == (BATCH, PROMPT + NEW)

    seconds: dict[str, list[float]] = {"ours": [], "hf": []}
    for _ in range(runs + 1):
        seconds["ours"].append(cpu_seconds(ours))
        seconds["hf"].append(cpu_seconds(theirs))
    rate = {name: BATCH * NEW / statistics.median(times[1:]) for name, times in seconds.items()}  # The first warms up.
    return {
        "vs_hf_generate": rate["ours"] / rate["hf"],
        "tokens_per_cpu_s": rate["ours"],
        "hf_tokens_per_cpu_s": rate["hf"],
    }


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
        metrics = measure(Path(folder), options.runs)
    metrics = {name: round(value, 3) for name, value in metrics.items()}
    if not options.json:
        print(
            f"embedded {metrics['tokens_per_cpu_s']:.0f}, generate {metrics['hf_tokens_per_cpu_s']:.0f} tokens per "
            f"CPU-second: {metrics['vs_hf_generate']:.2f} times"
        )
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
