"""One rank's engine in the hands of a check: only what every backend has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.validation import validate
from verl_engine.engine.base import Engine, LossFn, TokenOutput
from verl_engine.engine.snapshots.manager import Snapshots
from verl_engine.engine.temperature import temperature_of
from verl_engine.engine.token_output import OutputName
from verl_engine.engine.train_step import Normalizer, StepReport
from verl_engine.engine.weights.bucket import read_bucket
from verl_engine.engine.weights.module_weights import full_tensor
from verl_engine.engine.weights.shards import shard_of
from verl_engine.engine.weights.tensor_shards import TensorShards
from verl_engine.engine.worker import EngineWorker
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss

Split = list[list[list[int]]]
"""``split[data-parallel rank][micro-batch]``: indices of sequences."""


class Driver:
    """An engine with its host and worker, in a process that has a process group."""

    def __init__(self, section: Mapping[str, Any], folder: Path, rank: int, world_size: int) -> None:
        self.host = BackendHost.load(section["backend"])
        self.config = validate(self.host.spec.config_class, section, at="engine")
        torch.manual_seed(self.config.seed + rank)  # as a worker does before it builds its engine
        self.worker = EngineWorker(self.config, folder, rank, world_size)
        """Which never joined the process group, and so never ends any."""
        self.worker.create("conformance")

    @property
    def engine(self) -> Engine:
        """The engine itself."""
        return self.worker.engine

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel ranks: over how many a global batch is divided."""
        return self.engine.data_parallel.size

    def snapshots(self) -> Snapshots:
        """Return the engine's snapshots, none taken yet."""
        config = self.config
        return Snapshots(self.host, self.engine, config.snapshot_memory, config.snapshot_limit_bytes)

    def step(
        self,
        micro_batches: list[list[Sequence]],
        loss_fn: LossFn = weighted_loss,
        temperature: float = 1.0,
        normalizer: Normalizer = "tokens",
    ) -> StepReport:
        """Make one optimizer step over this rank's micro-batches."""
        return self.worker.train_batch(micro_batches, loss_fn, temperature, normalizer=normalizer)

    def train(self, sequences: list[Sequence], learning_rate: float | None = None) -> StepReport:
        """Make one optimizer step over a global batch, in two micro-batches per rank."""
        return self.worker.train_batch(self.micro_batches(sequences), weighted_loss, learning_rate=learning_rate)

    def train_on(self, *seeds: int) -> None:
        """Make a step over eight sequences of each seed."""
        for seed in seeds:
            self.train(make_sequences(8, seed=seed))

    def infer(self, sequences: list[Sequence], temperature: float = 1.0) -> list[torch.Tensor]:
        """Return each sequence's log-probs, in eval mode and without gradient, from a single micro-batch."""
        (parts,) = self.worker.infer_batch([sequences], temperature)
        return [torch.from_numpy(part) for part in parts]

    def output(self, sequence: Sequence, temperature: float = 1.0, top_k: int = 0) -> TokenOutput:
        """Return all that the engine says of one sequence, in eval mode and without gradient."""
        self.engine.set_training(False)
        batch = PackedBatch.from_sequences([sequence], self.engine.device.torch_device, top_k)
        with torch.no_grad():
            return self.engine.forward(batch, temperature_of(batch, temperature))

    def outputs(self, sequences: list[Sequence], names: tuple[OutputName, ...]) -> list[dict[str, torch.Tensor]]:
        """Return what the engine says of each sequence, by names of `TokenOutput`, as `infer` does."""
        (found,) = self.worker.infer_outputs([sequences], names)
        return [{name: torch.from_numpy(part) for name, part in parts.items()} for parts in found]

    def micro_batches(self, sequences: list[Sequence], num_micro_batches: int = 2) -> list[list[Sequence]]:
        """Return this rank's micro-batches of a global batch, divided in turn."""
        own = sequences[self.engine.data_parallel.rank :: self.data_parallel_size]
        return [own[index::num_micro_batches] for index in range(num_micro_batches)]

    def take(self, sequences: list[Sequence], split: Split) -> list[list[Sequence]]:
        """Look up this rank's micro-batches of a split."""
        return [[sequences[index] for index in group] for group in split[self.engine.data_parallel.rank]]

    def delivered(self, bucket_bytes: int, **options: Any) -> dict[str, torch.Tensor]:
        """Return copies of weights after a way through buckets, planned with the options, as to a rollout engine."""
        found = {}
        for bucket in self.worker.plan_weight_buckets(bucket_bytes, **options):
            buffer = np.zeros(bucket.num_bytes, np.uint8)
            checksum = self.worker.write_weight_bucket(bucket, buffer)
            found.update({name: tensor.clone() for name, tensor in read_bucket(buffer, bucket, checksum)})
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all full weights, as precise as the engine has them.

        One that exports what it computes in, such as bfloat16, has float32 masters in its state.
        """
        specs = self.engine.weight_specs()
        if any(spec.dtype != torch.float32 for spec in specs) and "checkpoints" not in self.host.spec.capabilities.gaps:
            # Put together on every rank from what each has. Collectives: one a tensor.
            return {name: _whole(tensor) for name, tensor in self.engine.state_dict()["model"].items()}
        names = [spec.name for spec in specs]
        return {name: tensor.detach().cpu().clone() for name, tensor in self.engine.full_weights(names)}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, TensorShards):
        return full_tensor(tensor).cpu().clone()
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [(offsets, part.cpu()) for offsets, part in tensor.shards])
    whole = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    for offsets, part in (entry for parts in held for entry in parts):
        shard_of(whole, offsets, part.shape).copy_(part)
    return whole


def all_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    """Say how two sets of weights differ, in a few words."""
    odd = sorted(found.keys() ^ expected.keys())
    if odd:
        return f"names that only one of them has: {', '.join(odd[:5])}"
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    if not differing:
        return "none"
    worst = max(differing, key=lambda name: float((found[name].float() - expected[name].float()).abs().max()))
    largest = float((found[worst].float() - expected[worst].float()).abs().max())
    return f"{len(differing)} of {len(expected)} weights differ, most of all {worst} by {largest:.3g}"
