"""Snapshots of DTensors: each rank keeps its own shards, however they are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot
from verl_engine.engine.weights.module_weights import local_tensors

if TYPE_CHECKING:
    from verl_engine.testing.rank_pools import OnRanks


def weights() -> dict[str, DTensor]:
    """Cut by rows, by columns, unevenly, so that a rank has nothing, and not at all; and one plain tensor."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).reshape(4, 6)
    return {
        "rows": distribute_tensor(whole.clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
        "uneven": distribute_tensor(torch.arange(5, dtype=torch.int64), mesh, [Shard(0)]),
        "one row": distribute_tensor(torch.ones(1, 3, dtype=torch.bfloat16), mesh, [Shard(0)]),
        "everywhere": distribute_tensor(torch.tensor(True), mesh, [Replicate()]),
    }


def mixed_placements(rank: int) -> None:
    live = weights()
    before = {name: tensor.full_tensor().clone() for name, tensor in live.items()}
    snapshot = WeightSnapshot("kept").store(local_tensors(live.items()))
    assert snapshot.tensors["columns"].shape == (4, 3)
    assert snapshot.tensors["one row"].numel() == (3 if rank == 0 else 0)
    for tensor in live.values():
        tensor.zero_()
    snapshot.copy_into(local_tensors(live.items()))
    assert all(torch.equal(tensor.full_tensor(), before[name]) for name, tensor in live.items())
    for tensor in live.values():
        tensor.zero_()
    snapshot.copy_into(live.items())  # DTensors themselves will do
    assert all(torch.equal(tensor.full_tensor(), before[name]) for name, tensor in live.items())


def unseen_by_version_counters(rank: int) -> None:
    """What torch's own optimizer does to DTensors; neither they nor their shards count it."""
    live = {name: tensor for name, tensor in weights().items() if tensor.is_floating_point() and tensor.ndim > 1}
    parameters = [torch.nn.Parameter(tensor) for tensor in live.values()]
    named = dict(zip(live, parameters, strict=True))
    snapshot = WeightSnapshot("kept")
    snapshot.weights_id = 0
    snapshot.store(local_tensors(named.items()))
    before = snapshot.checksum
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, lr=0.5, fused=True).step()
    snapshot.store(local_tensors(named.items()))
    assert snapshot.checksum != before, rank


@pytest.mark.dist
def test_mixed_placements_and_empty_shards_come_back(on_ranks: OnRanks) -> None:
    on_ranks(mixed_placements)


@pytest.mark.dist
def test_a_step_of_dtensors_that_nobody_noted_is_saved(on_ranks: OnRanks) -> None:
    on_ranks(unseen_by_version_counters)
