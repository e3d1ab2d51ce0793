"""How ranks are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from verl_engine.contract.errors import ConfigError
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.mesh import build_meshes

if TYPE_CHECKING:
    from verl_engine.testing.rank_pools import OnRanks


def config(**settings: Any) -> Fsdp2Config:
    return Fsdp2Config(learning_rate=1e-3, device="cpu", **settings)


def places(rank: int) -> dict[str, Any]:
    """Say where a rank of four is, in each division."""
    del rank
    alone = build_meshes(config(), "cpu")
    copies = build_meshes(config(shard_ranks=2), "cpu")
    sequences = build_meshes(config(sequence_parallel_size=2), "cpu")
    assert alone.sequence is None
    assert copies.sequence is None
    assert sequences.sequence is not None
    return {
        "alone": (alone.weights.mesh_dim_names, alone.weights.get_coordinate(), alone.data_parallel.rank),
        "copies": (copies.weights.mesh_dim_names, copies.weights.get_coordinate(), copies.data_parallel.size),
        "sequences": (
            sequences.data_parallel.rank,
            sequences.data_parallel.size,
            dist.get_process_group_ranks(sequences.sequence),
        ),
    }


@pytest.mark.dist
def test_four_ranks_are_divided_as_configured(on_ranks: OnRanks) -> None:
    found = on_ranks(places, world_size=4)
    assert [place["alone"] for place in found] == [(("shard",), (rank,), rank) for rank in range(4)]
    # Neighbours share a copy: they are on one machine, where gathering is fast.
    axes = ("replicate", "shard")
    assert [place["copies"] for place in found] == [
        (axes, (0, 0), 4),
        (axes, (0, 1), 4),
        (axes, (1, 0), 4),
        (axes, (1, 1), 4),
    ]
    assert [place["sequences"] for place in found] == [(0, 2, [0, 1]), (0, 2, [0, 1]), (1, 2, [2, 3]), (1, 2, [2, 3])]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard_ranks": 3}, r"engine\.shard_ranks=3 does not divide the 8 ranks; use one of 1, 2, 4, 8"),
        ({"sequence_parallel_size": 5}, r"engine\.sequence_parallel_size=5 does not divide"),
        (
            {"reshard_after_forward": 3},
            r"engine\.reshard_after_forward=3 does not divide the 8 ranks that share a copy .* use true, false or one",
        ),
        (
            {"reshard_after_forward": 8, "shard_ranks": 4},
            r"engine\.reshard_after_forward=8 does not divide the 4 ranks that share a copy .*one of 1, 2, 4$",
        ),
    ],
)
def test_what_does_not_divide_the_ranks_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings).validate_world(8)


def test_a_number_to_reshard_to_divides_the_ranks_that_share_a_copy() -> None:
    config(reshard_after_forward=2, shard_ranks=4).validate_world(8)
    config(reshard_after_forward=True, shard_ranks=1).validate_world(8)
