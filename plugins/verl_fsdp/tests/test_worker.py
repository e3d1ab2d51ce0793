"""The calls that a trainer makes to one rank for snapshots and for checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.worker import EngineWorker
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks


def weights(worker: EngineWorker) -> torch.Tensor:
    names = [spec.name for spec in worker.engine.weight_specs()]
    return torch.cat([tensor.flatten().clone() for _, tensor in worker.engine.full_weights(names)])


def keep_and_return(rank: int, folder: Path, checkpoint: Path) -> None:
    worker = EngineWorker(Fsdp2Config(learning_rate=1e-2, device="cpu"), folder, rank, 2)
    worker.create()
    first = weights(worker)
    worker.save_model_to_cpu(1)
    worker.train_batch([make_sequences(2, seed=rank)], weighted_loss)
    second = weights(worker)
    assert not torch.equal(first, second)
    worker.save_checkpoint(checkpoint, 1)
    worker.wait_for_checkpoint()
    worker.restore_model_from_cpu(1)
    assert torch.equal(weights(worker), first)
    assert worker.load_checkpoint(checkpoint).step == 1
    assert torch.equal(weights(worker), second)
    worker.clear_cpu_model(1)
    with pytest.raises(WeightsError, match="no weights were saved under '1'"):
        worker.restore_model_from_cpu(1)


@pytest.mark.dist
def test_weights_kept_aside_and_checkpoints_come_back(model_folder: Path, tmp_path: Path, on_ranks: OnRanks) -> None:
    on_ranks(keep_and_return, model_folder, tmp_path / "step-1")


def train_beside_a_reference(rank: int, folder: Path, store: Path) -> None:
    def start(name: str, *, forward_only: bool = False) -> EngineWorker:
        config = Fsdp2Config(learning_rate=1e-2, device="cpu", forward_only=forward_only)
        worker = EngineWorker(config, folder, rank, 2)
        worker.prepare(f"file://{store}/{name}")
        worker.create(name)
        return worker

    sequences = [make_sequences(2, seed=rank)]
    actor, reference = start("actor"), start("reference", forward_only=True)
    before = reference.infer_batch(sequences)
    np.testing.assert_array_equal(np.concatenate(actor.infer_batch(sequences)[0]), np.concatenate(before[0]))
    actor.train_batch(sequences, weighted_loss)
    np.testing.assert_array_equal(np.concatenate(reference.infer_batch(sequences)[0]), np.concatenate(before[0]))
    reference.close()
    actor.train_batch(sequences, weighted_loss)
    found = weights(actor)
    actor.close()
    alone = start("alone")
    for _ in range(2):
        alone.train_batch(sequences, weighted_loss)
    assert torch.equal(weights(alone), found)
    alone.close()
    assert dist.is_initialized()  # these ranks had their group before


@pytest.mark.dist
@pytest.mark.fault(18)
def test_an_actor_and_its_reference_in_one_process(model_folder: Path, tmp_path: Path, on_ranks: OnRanks) -> None:
    on_ranks(train_beside_a_reference, model_folder, tmp_path)
