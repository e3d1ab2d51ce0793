"""Snapshots of sharded engines: the states in which others lose or alias them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from verl_engine.engine.worker import EngineWorker
from verl_engine.host.engine_section import validate_engine_section
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks

SECTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2 in shared memory": {"backend": "fsdp2", "snapshot_memory": "shared"},
    "fsdp2 that keeps layers gathered": {"backend": "fsdp2", "reshard_after_forward": False},
    "fsdp": {"backend": "fsdp"},
    "fsdp that keeps layers gathered": {"backend": "fsdp", "reshard_after_forward": False},
}


def make_worker(rank: int, folder: Path, section: dict[str, Any]) -> EngineWorker:
    config = validate_engine_section({**section, "learning_rate": 1e-2, "device": "cpu"})
    worker = EngineWorker(config, folder, rank, 2)
    worker.create()
    return worker


def weights(worker: EngineWorker) -> torch.Tensor:
    names = [spec.name for spec in worker.engine.weight_specs()]
    return torch.cat([tensor.flatten().clone() for _, tensor in worker.engine.full_weights(names)])


def after_inference(rank: int, folder: Path, section: dict[str, Any]) -> None:
    worker = make_worker(rank, folder, section)
    batch = [make_sequences(2, seed=rank)]
    first = weights(worker)
    worker.infer_batch(batch)
    worker.save_model_to_cpu(1)
    worker.train_batch(batch, weighted_loss)
    worker.infer_batch(batch)
    second = weights(worker)
    assert not torch.equal(first, second)
    worker.save_model_to_cpu(2)
    for tag, expected in ((1, first), (2, second), (1, first)):
        worker.infer_batch(batch)
        worker.restore_model_from_cpu(tag)
        assert torch.equal(weights(worker), expected)
    worker.close()


def old_policy(rank: int, folder: Path, section: dict[str, Any]) -> None:
    worker = make_worker(rank, folder, section)
    batch = [make_sequences(2, seed=rank)]
    ((*before,),) = worker.infer_batch(batch)
    worker.save_model_to_cpu(1)
    for _ in range(2):
        worker.train_batch(batch, weighted_loss)
        newest = weights(worker)
        ((*now,),) = worker.infer_batch(batch)
        ((*old,),) = worker.infer_batch(batch, tag=1)
        assert all((a == b).all() for a, b in zip(old, before, strict=True))
        assert not all((a == b).all() for a, b in zip(old, now, strict=True))
        assert torch.equal(weights(worker), newest)
    worker.close()


def offloaded(rank: int, folder: Path, section: dict[str, Any]) -> None:
    worker = make_worker(rank, folder, section)
    batch = [make_sequences(2, seed=rank)]
    first = weights(worker)
    worker.engine.move(to_cpu=True)
    worker.save_model_to_cpu(1)
    worker.engine.move(to_cpu=False)
    worker.train_batch(batch, weighted_loss)
    assert not torch.equal(weights(worker), first)
    worker.restore_model_from_cpu(1)
    assert torch.equal(weights(worker), first)
    worker.close()


@pytest.mark.dist
@pytest.mark.parametrize("name", SECTIONS)
def test_weights_come_back_after_inference_in_between(name: str, model_folder: Path, on_ranks: OnRanks) -> None:
    on_ranks(after_inference, model_folder, SECTIONS[name])


@pytest.mark.dist
@pytest.mark.parametrize("name", ["fsdp2", "fsdp"])
def test_log_probs_of_an_older_policy_are_bit_for_bit_what_they_were(
    name: str, model_folder: Path, on_ranks: OnRanks
) -> None:
    on_ranks(old_policy, model_folder, SECTIONS[name])


@pytest.mark.dist
@pytest.mark.parametrize("name", ["fsdp2", "fsdp"])
def test_what_is_saved_while_offloaded_is_no_alias_of_the_weights(
    name: str, model_folder: Path, on_ranks: OnRanks
) -> None:
    on_ranks(offloaded, model_folder, SECTIONS[name])
