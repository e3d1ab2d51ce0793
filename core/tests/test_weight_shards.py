"""Weights in parts: places, assembly, and what changed."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from verl_engine.contract.errors import UnsupportedError, WeightsError
from verl_engine.engine.base import WeightShard, WeightSpec
from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_engine.engine.weights.module_weights import Exported, LowRank, weight_specs
from verl_engine.engine.weights.shards import assemble_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from verl_engine.testing.rank_pools import OnRanks

WEIGHTS = EngineWeights(torch.nn.Module())
SPEC = WeightSpec("a", (3, 2), torch.float32)
WHOLE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def rows(first: int, last: int, name: str = "a") -> WeightShard:
    """Rows of the matrix, as a rank would hold them."""
    return WeightShard(name, (3, 2), (first, 0), WHOLE[first:last])


def assemble(shards: Sequence[WeightShard], spec: WeightSpec = SPEC) -> torch.Tensor:
    [(name, tensor)] = list(assemble_weights([spec], shards))
    assert name == spec.name
    return tensor


@pytest.mark.parametrize(
    "shards",
    [
        [rows(0, 3)],
        [rows(2, 3), rows(0, 2)],
        [rows(0, 2), rows(0, 2), rows(2, 3), rows(2, 3)],
        [rows(0, 3), WeightShard("a", (3, 2), (3, 0), torch.zeros(0, 2))],
    ],
    ids=["one", "out of order", "replicated", "with an empty one"],
)
def test_parts_make_a_whole(shards: list[WeightShard]) -> None:
    assert torch.equal(assemble(shards), WHOLE)


def test_flat_parts_make_a_whole() -> None:
    flat = [WeightShard("a", (6,), (0,), WHOLE.view(-1)[:4]), WeightShard("a", (6,), (4,), WHOLE.view(-1)[4:])]
    assert torch.equal(assemble(flat), WHOLE)


def test_a_scalar_is_a_part_of_its_own() -> None:
    spec = WeightSpec("count", (), torch.int64)
    assert assemble([WeightShard("count", (), (), torch.tensor(7))], spec) == 7


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([rows(0, 1), rows(2, 3)], r"the shards of a leave 2 of 6 elements out, the first at \(1, 0\) of \(3, 2\)"),
        ([], r"the shards of a leave 6 of 6 elements out"),
        ([WeightShard("a", (3, 3), (0, 0), torch.zeros(3, 3))], r"are shards of a weight of shape \[\(3, 3\)\]"),
        ([WeightShard("a", (3, 2), (2, 0), torch.zeros(2, 2))], r"at \(2, 0\) does not lie in a weight"),
        ([WeightShard("a", (3, 2), (-1, 0), torch.zeros(3, 2))], r"at \(-1, 0\) does not lie in a weight"),
        ([WeightShard("a", (3, 2), (0,), torch.zeros(3, 2))], r"at \(0,\) does not lie in a weight"),
        ([WeightShard("a", (3, 2), (0, 0), torch.zeros(6))], r"of shape \(6,\) at \(0, 0\) does not lie in a weight"),
        ([rows(0, 3), rows(0, 3, "b")], "nobody asked for: b"),
        ([rows(0, 2), WeightShard("a", (6,), (4,), torch.zeros(2))], r"of shape \[\(3, 2\), \(6,\)\]"),
    ],
    ids=[
        "a gap",
        "nothing",
        "another weight",
        "over the edge",
        "before it",
        "no column",
        "a vector",
        "unknown",
        "two views",
    ],
)
def test_success_is_not_reported_where_parts_are_missing_or_do_not_fit(shards: list[WeightShard], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        assemble(shards)


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((2,), (Shard(0),)),
    "columns": ((2,), (Shard(1),)),
    "replicated": ((2,), (Replicate(),)),
    "copies of rows": ((2, 2), (Replicate(), Shard(0))),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "rows of rows": ((2, 2), (Shard(0), Shard(0))),
}


def in_parts(_rank: int, layout: str, shape: tuple[int, ...]) -> list[tuple[WeightShard, torch.Tensor]]:
    """Export a sharded weight, plain and with an adapter, and take other values back in."""
    sizes, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes)
    numel = torch.Size(shape).numel()
    weight = distribute_tensor(torch.arange(numel, dtype=torch.float32).view(shape), mesh, placements)
    low_rank = None
    if len(shape) == 2:
        a_RI = torch.arange(float(shape[1])).view(1, -1)
        b_OR = torch.arange(float(shape[0])).view(-1, 1)
        low_rank = LowRank(distribute_tensor(a_RI, mesh, placements), distribute_tensor(b_OR, mesh, placements), 0.5)
    plain, adapted = {"w": Exported(weight)}, {"adapted": Exported(weight, low_rank)}
    found = [*WEIGHTS.shards(plain), *WEIGHTS.shards(adapted)]
    copies = [WeightShard(shard.name, shard.view_shape, shard.offsets, shard.tensor.clone()) for shard in found]
    wholes = [tensor.clone() for _, tensor in (*WEIGHTS.full(plain, ["w"]), *WEIGHTS.full(adapted, ["adapted"]))]
    WEIGHTS.load_shards(
        plain, [WeightShard(shard.name, shard.view_shape, shard.offsets, shard.tensor + 100) for shard in copies[:1]]
    )
    assert torch.equal(full(plain), wholes[0] + 100)
    WEIGHTS.load_full(plain, [("w", wholes[0] - 5)])
    assert torch.equal(full(plain), wholes[0] - 5)
    return list(zip(copies, wholes, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 1), (3, 5)], ids=str)
def test_parts_of_all_ranks_are_the_whole_however_it_is_sharded(
    layout: str, shape: tuple[int, ...], on_ranks: OnRanks
) -> None:
    """Uneven and empty parts too: one row on two ranks."""
    sizes = LAYOUTS[layout][0]
    ranks = on_ranks(in_parts, layout, shape, world_size=prod(sizes))
    expected = torch.arange(float(shape[0] * shape[1])).view(shape)
    addition = 0.5 * torch.arange(float(shape[0]))[:, None] * torch.arange(float(shape[1]))
    for index, right in enumerate((expected, expected + addition)):
        shards = [rank[index][0] for rank in ranks]
        spec = WeightSpec(shards[0].name, shape, torch.float32)
        assert torch.equal(assemble(shards, spec), right)
        assert all(torch.equal(rank[index][1], right) for rank in ranks)


def refusals(_rank: int) -> list[str]:
    """What a weight of four rows on two ranks does not take."""
    mesh = init_device_mesh("cpu", (2,))
    weight = {"w": Exported(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))}
    [own] = list(WEIGHTS.shards(weight))
    other = WeightShard("w", (4, 2), (2 - own.offsets[0], 0), torch.ones(2, 2))
    partial = {"p": Exported(DTensor.from_local(torch.ones(2), mesh, [Partial()]))}
    messages = [
        message_of(lambda: WEIGHTS.load_shards(weight, [other])),
        message_of(lambda: WEIGHTS.load_shards(weight, [])),
        message_of(lambda: WEIGHTS.load_shards(weight, [own, own])),
        message_of(lambda: WEIGHTS.load_full(weight, [])),
        message_of(lambda: list(WEIGHTS.shards(partial))),
    ]
    assert not full(weight).any()
    return messages


def message_of(attempt: Callable[[], object]) -> str:
    """Return the message that an attempt fails with."""
    with pytest.raises((WeightsError, UnsupportedError)) as caught:
        attempt()
    return str(caught.value)


def full(exported: dict[str, Exported]) -> torch.Tensor:
    """Return the only weight."""
    [(_, tensor)] = list(WEIGHTS.full(exported, list(exported)))
    return tensor


@pytest.mark.dist
def test_another_ranks_part_a_missing_one_and_a_doubled_one_are_refused(on_ranks: OnRanks) -> None:
    for messages in on_ranks(refusals):
        misplaced, missing, doubled, nothing, partial = messages
        assert "is not this rank's, which is at" in misplaced
        assert missing == nothing == "1 weights are missing: w"
        assert "had it already" in doubled
        assert "only a partial sum" in partial


def test_a_merged_weight_is_worked_out_by_hand() -> None:
    """A = (1 2), B = (1 0)^T, scale 2: the first row grows by (2 4)."""
    base = torch.ones(2, 2)
    exported = {"w": Exported(base, LowRank(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0]]), 2.0))}
    [(name, merged)] = list(WEIGHTS.full(exported, ["w"]))
    assert (name, merged.tolist()) == ("w", [[3.0, 5.0], [1.0, 1.0]])
    assert base.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert weight_specs(exported) == [WeightSpec("w", (2, 2), torch.float32)]


def test_a_merged_weight_cannot_be_loaded() -> None:
    exported = {"w": Exported(torch.ones(1, 1), LowRank(torch.ones(1, 1), torch.ones(1, 1), 1.0))}
    with pytest.raises(UnsupportedError, match=r"engine\.lora: full weights cannot be told apart"):
        WEIGHTS.load_full(exported, [("w", torch.ones(1, 1))])
    with pytest.raises(UnsupportedError, match=r"engine\.lora: full weights cannot be told apart"):
        WEIGHTS.load_shards(exported, [])
