"""The norm of a gradient that lies on several meshes, and clipping by it, against torch's own on the whole gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from verl_fsdp.update.grad_norm import clip_gradients, grad_norm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from verl_engine.testing.rank_pools import OnRanks


def norm_and_clipped(rank: int) -> tuple[float, list[float]]:
    """Rank 0 holds (3, 4) and a parameter without gradient, rank 1 an empty shard."""
    shard = torch.nn.Parameter(torch.zeros(2 if rank == 0 else 0))
    shard.grad = torch.tensor([3.0, 4.0])[: len(shard)]
    parameters = [shard, torch.nn.Parameter(torch.zeros(1))]
    norm = grad_norm(parameters, None)
    clip_gradients(parameters, norm, 1.0)
    return float(norm), shard.grad.tolist()


@pytest.mark.dist
def test_a_rank_with_empty_shards_has_part_in_the_norm(on_ranks: OnRanks) -> None:
    (norm, clipped), (norm_of_other, clipped_of_other) = on_ranks(norm_and_clipped)
    assert norm == norm_of_other == 5.0
    assert clipped == pytest.approx([0.6, 0.8])
    assert clipped_of_other == []


def norm_of_nothing(_rank: int) -> float:
    return float(grad_norm([torch.nn.Parameter(torch.zeros(2))], None))


@pytest.mark.dist
def test_without_any_gradient_the_norm_is_zero(on_ranks: OnRanks) -> None:
    assert on_ranks(norm_of_nothing, world_size=1) == [0.0]


def whole_gradients() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {
        "rows": torch.randn(8, 6),
        "uneven rows": torch.randn(5, 3),
        "columns": torch.randn(6, 8),
        "replicated over one axis": torch.randn(8, 2),
        "on a mesh of its own": torch.randn(4, 4),
        "sharded twice": torch.randn(8, 8),
        "plain": torch.randn(7),
    }


def placements_of(name: str, ranks: DeviceMesh, square: DeviceMesh) -> tuple[DeviceMesh, list[Any]] | None:
    """Say how each gradient lies on the ranks; None for a plain copy on each."""
    places: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (ranks, [Shard(0)]),
        "uneven rows": (ranks, [Shard(0)]),
        "columns": (ranks, [Shard(1)]),
        "replicated over one axis": (square, [Replicate(), Shard(0)]),
        "on a mesh of its own": (square["inner"], [Shard(0)]),
        "sharded twice": (square, [Shard(0), Shard(1)]),
    }
    return places.get(name)


def mixed_meshes(
    rank: int, world_size: int, max_norm: float, poison: str = ""
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the norm, and every gradient after clipping, whole again."""
    ranks = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("outer", "inner"))
    parameters = {}
    for name, gradient in whole_gradients().items():
        place = placements_of(name, ranks, square)
        values = torch.zeros_like(gradient)
        if place is None:
            parameters[name] = torch.nn.Parameter(values)
            parameters[name].grad = gradient.clone()
        else:
            parameters[name] = torch.nn.Parameter(distribute_tensor(values, *place))
            parameters[name].grad = distribute_tensor(gradient, *place)
    if poison and rank == world_size - 1:
        found: Any = parameters[poison].grad
        (found.to_local() if hasattr(found, "to_local") else found)[0] = float("inf")
    norm = grad_norm(parameters.values(), None, plain_copies=world_size)
    clip_gradients(parameters.values(), norm, max_norm)
    after: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        clipped: Any = parameter.grad
        after[name] = clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped
    return float(norm), after


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 4])
def test_norm_and_clipping_over_mixed_meshes_are_those_of_the_whole_gradient(
    world_size: int, on_ranks: OnRanks
) -> None:
    parameters = {name: torch.nn.Parameter(torch.zeros_like(value)) for name, value in whole_gradients().items()}
    for name, gradient in whole_gradients().items():
        parameters[name].grad = gradient
    expected = float(torch.nn.utils.clip_grad_norm_(parameters.values(), 2.5))
    results = on_ranks(mixed_meshes, world_size, 2.5, world_size=world_size)
    assert len({norm for norm, _ in results}) == 1, "every rank has the same to the last bit"
    for norm, clipped in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        for name, parameter in parameters.items():
            torch.testing.assert_close(clipped[name], parameter.grad)


@pytest.mark.dist
@pytest.mark.parametrize("poison", ["rows", "plain"])
def test_what_is_not_finite_on_one_rank_shows_on_all_and_clipping_writes_nothing(
    poison: str, on_ranks: OnRanks
) -> None:
    for norm, after in on_ranks(mixed_meshes, 2, 2.5, poison):
        assert norm == float("inf")
        for name, gradient in whole_gradients().items():
            assert not after[name].isnan().any()
            if name != poison:
                assert torch.equal(after[name], gradient), name


def test_below_the_limit_nothing_is_changed_and_a_loss_scale_is_divided_out() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(clip_gradients([parameter], torch.tensor(5.0), 10.0)) == 5.0
    assert parameter.grad.tolist() == [3.0, 4.0]
    parameter.grad = torch.tensor([3.0, 4.0]) * 1024
    assert float(clip_gradients([parameter], torch.tensor(5.0 * 1024), 10.0, scale=1024)) == 5.0
    assert parameter.grad.tolist() == [3.0, 4.0]
    parameter.grad = torch.tensor([3.0, 4.0]) * 1024
    assert float(clip_gradients([parameter], torch.tensor(5.0 * 1024), 1.0, scale=1024)) == 5.0
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])


def norm_of_16_bits(_rank: int) -> float:
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1.0)
    return float(grad_norm([parameter], None))


@pytest.mark.dist
def test_squares_of_16_bit_gradients_are_added_in_float32(on_ranks: OnRanks) -> None:
    # The square root of 1000 is 31.62; in bfloat16 it would be 31.625.
    assert on_ranks(norm_of_16_bits, world_size=1) == [pytest.approx(1000**0.5, rel=1e-6)]
