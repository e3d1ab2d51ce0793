"""What the engine costs over Megatron's own loop: `step_vs_raw`, steps of a bare loop's time over the engine's.

Both train the same model on the same packed micro-batches, in float32 on the CPU: Megatron's GPTModel with its
DistributedDataParallel, distributed optimizer and schedule, log-prob loss, clipping, AdamW. The bare loop is what a
script over Megatron does; it takes the plain PyTorch layers of this package, for Megatron has none that run packed
sequences on a CPU. The two take turns in the same processes, each first in every other turn; metrics are medians over
the turns, in CPU time of all threads, once with one rank and once with two that share the data.
"""

from __future__ import annotations

import argparse
import copy
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
import torch.distributed as dist

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.plan import plan_micro_batches
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.validation import validate
from verl_engine.engine.train_step import train_step
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.ranks import run_ranks
from verl_engine.testing.tiny_models import tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_engine.engine.base import TokenOutput

LIMIT = 0.97
LEARNING_RATE = 1e-4
MAX_TOKENS = 1024
VOCAB = 4096
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip


def negative_log_likelihood(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the loss tokens."""
    return -output.log_probs[batch.loss_positions].sum(), {}


class EngineStep:
    """The step as a job makes it."""

    def __init__(self, folder: Path) -> None:
        self.host = BackendHost.load("megatron")
        section = {"backend": "megatron", "device": "cpu", "learning_rate": LEARNING_RATE}
        config = validate(self.host.spec.config_class, section, at="engine")
        self.host.prepare_process(config)
        self.engine: Any = self.host.create(config, folder, "actor")

    def __call__(self, batches: list[PackedBatch]) -> float:
        """Make one step; return the loss."""
        return train_step(self.host, self.engine, batches, negative_log_likelihood).loss


class RawStep:
    """The same by hand."""

    def __init__(self, engine: Any) -> None:
        """Build a model like the engine's, with its weights. Megatron is imported here: the engine prepared for it."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from verl_megatron_mindspeed.model.layers import block_spec

        [theirs] = engine.model.parts()
        config = copy.copy(theirs.config)
        model = GPTModel(
            config=config, transformer_layer_spec=block_spec(config, None, local=True), vocab_size=VOCAB,
            max_sequence_length=SIZES["max_position_embeddings"], position_embedding_type="rope",
            rotary_base=theirs.rotary_base, share_embeddings_and_output_weights=False,
        )  # fmt: skip
        model.load_state_dict(theirs.state_dict())
        gradients = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config=config, ddp_config=gradients, module=model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=LEARNING_RATE, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8,
                clip_grad=1.0, use_distributed_optimizer=True, params_dtype=torch.float32,
            ),
            [self.model], use_gloo_process_groups=False,
        )  # fmt: skip
        config.no_sync_func = self.model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.run = get_forward_backward_func()

    def __call__(self, batches: list[PackedBatch]) -> float:
        """Make one step; return the loss."""
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self.run(
            forward_step_func=forward, data_iterator=iter(batches), model=self.model, num_microbatches=len(batches),
            seq_length=MAX_TOKENS, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        self.optimizer.step()
        total = torch.stack([torch.stack(pair) for pair in sums]).sum(0)
        dist.all_reduce(total)
        return float(total[0] / total[1])


def forward(batches: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch, as Megatron's schedule asks for it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    batch = next(batches)
    starts = torch.tensor([0, *np.cumsum(batch.lengths)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts,
        max_seqlen_q=max(batch.lengths), max_seqlen_kv=max(batch.lengths),
    )  # fmt: skip
    labels, mask = batch.input_ids.roll(-1), batch.loss_mask.roll(-1)
    losses = model(batch.input_ids[None], batch.position_ids[None], None, labels=labels[None], packed_seq_params=packed)

    def sum_up(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        loss, count = losses[0][mask].sum(), mask.sum().int()
        return loss, count, (loss.detach(), count)

    return losses, sum_up


def write_model(folder: Path) -> Path:
    """Write a model with random weights, large enough that matrix products count."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**tiny_config(VOCAB), **SIZES})
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def draw_sequences(num: int) -> list[Sequence]:
    """Draw sequences of lognormal lengths, about 150 tokens in the mean.

    All tokens but the first are in the loss: the bare loop computes logits for all, the engine for these only. Token 0
    is left out, for the model pads with it: its embedding is not trained, and Megatron by itself does not know.
    """
    random = np.random.default_rng(0)
    lengths = random.lognormal(4.8, 0.7, num).clip(8, 512).astype(int)
    return [Sequence(random.integers(1, VOCAB, length), np.arange(length) > 0, {}) for length in lengths]


def measure(rank: int, folder: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Let both take turns; return CPU seconds and losses of each turn."""
    sequences = draw_sequences(24 * dist.get_world_size())
    plan = plan_micro_batches([len(sequence) for sequence in sequences], dist.get_world_size(), MAX_TOKENS)
    batches = [PackedBatch.from_sequences([sequences[index] for index in group]) for group in plan[rank]]
    engine = EngineStep(folder)
    in_use = engine.engine.parallel.in_use
    with in_use():
        ways: dict[str, Any] = {"engine": engine, "raw": RawStep(engine.engine)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in sorted(ways, reverse=turn % 2 == 0):
            with in_use() if name == "raw" else nullcontext():
                dist.barrier()
                start = time.process_time()
                losses[name].append(ways[name](batches))
                if turn:  # the first warms up
                    seconds[name].append(time.process_time() - start)
    return seconds, losses


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: %(default)s)")
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
