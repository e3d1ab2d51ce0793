"""The calls that a trainer makes to one rank for weights kept aside and for checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

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
