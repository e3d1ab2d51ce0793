"""What the engine costs over a loop written by hand: `step_vs_raw`, tokens per CPU-second of fsdp2 over a raw loop.

Both train the same model on the same packed micro-batches: forward, backward without reduction but at the last,
clipping, AdamW. The raw loop is what PyTorch's own documents show for ``fully_shard``. The two take turns in the same
processes; metrics are medians over the turns, in CPU time of all threads, once with one rank and once with two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.plan import plan_micro_batches
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.validation import validate
from verl_engine.engine.train_step import train_step
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.ranks import run_ranks
from verl_engine.testing.tiny_models import tiny_config
from verl_fsdp.forward.attention import PACKED_ATTENTION

if TYPE_CHECKING:
    from verl_engine.engine.base import TokenOutput

LIMIT = 0.98
MAX_TOKENS = 1024
VOCAB = 4096
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
    "max_position_embeddings": 1024,
}  # fmt: skip


def negative_log_likelihood(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the loss tokens."""
    return -output.log_probs[batch.loss_positions].sum(), {}


class EngineStep:
    """The step as a job makes it."""

    def __init__(self, folder: Path) -> None:
        self.host = BackendHost.load("fsdp2")
        # One chunk: the raw loop keeps all logits, so the engine computes them once too.
        section = {"backend": "fsdp2", "device": "cpu", "learning_rate": 1e-4, "logit_chunk": 2 * MAX_TOKENS}
        config = validate(self.host.spec.config_class, section, at="engine")
        self.engine = self.host.create(config, folder, "actor")

    def __call__(self, batches: list[PackedBatch]) -> float:
        """Make one step; return the loss."""
        return train_step(self.host, self.engine, batches, negative_log_likelihood).loss


class RawStep:
    """The same by hand."""

    def __init__(self, folder: Path) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, trust_remote_code=False
        )
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def __call__(self, batches: list[PackedBatch]) -> float:
        """Make one step; return the loss."""
        count = torch.tensor(sum(batch.loss_positions.numel() for batch in batches))
        dist.all_reduce(count)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            self.model.set_requires_gradient_sync(index == len(batches) - 1)
            logits = self.model(
                input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False,
                logits_to_keep=batch.loss_positions - 1, packed_runs=batch.segment_runs,
            ).logits[0]  # fmt: skip
            targets = batch.input_ids[batch.loss_positions]
            loss = -logits.float().log_softmax(-1).gather(-1, targets[:, None]).sum()
            (loss * dist.get_world_size() / count).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total / count)


def write_model(folder: Path) -> Path:
    """Write a model with random weights, large enough that matrix products count."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**tiny_config(VOCAB), **SIZES})
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def draw_sequences(num: int) -> list[Sequence]:
    """Draw sequences of lognormal lengths, about 150 tokens in the mean."""
    random = np.random.default_rng(0)
    sequences = []
    for length in random.lognormal(4.8, 0.7, num).clip(8, 512).astype(int):
        mask = np.arange(length) >= length // 3
        sequences.append(Sequence(random.integers(0, VOCAB, length), mask, {}))
    return sequences


def measure(rank: int, folder: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Let both take turns; return CPU seconds and losses of each turn."""
    sequences = draw_sequences(24 * dist.get_world_size())
    plan = plan_micro_batches([len(sequence) for sequence in sequences], dist.get_world_size(), MAX_TOKENS)
    batches = [PackedBatch.from_sequences([sequences[index] for index in group]) for group in plan[rank]]
    ways: dict[str, Any] = {"engine": EngineStep(folder), "raw": RawStep(folder)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, step in ways.items():
            dist.barrier()
            start = time.process_time()
            losses[name].append(step(batches))
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - start)
    return seconds, losses


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        for world_size in (1, 2):
            results = run_ranks(measure, model, options.rounds, world_size=world_size)
            losses = results[0][1]
            if not np.allclose(losses["engine"], losses["raw"], rtol=1e-4):
                sys.exit(f"the two do not compute the same: losses {losses}")
            turns = {
                name: [sum(parts) for parts in zip(*(seconds[name] for seconds, _ in results), strict=True)]
                for name in ("engine", "raw")
            }
            ratios = [raw / engine for engine, raw in zip(turns["engine"], turns["raw"], strict=True)]
            metrics[f"step_vs_raw_{world_size}_ranks"] = statistics.median(ratios)
            if not options.json:
                for name, values in turns.items():
                    print(f"{world_size} ranks, {name}: {statistics.median(values):.3f} CPU s a step")
    metrics["step_vs_raw"] = min(metrics.values())
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}))
    if metrics["step_vs_raw"] < LIMIT:
        sys.exit(f"step_vs_raw={metrics['step_vs_raw']:.3f} is below {LIMIT}")


if __name__ == "__main__":
    main()
