"""Tensors of which a rank holds several parts, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from core.tests.test_module_engine import PlainEngine, make
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.weights.tensor_shards import TensorShards

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

SHAPE = (3, 4)


@pytest.fixture
def two(rank_pools: RankPools) -> RankPool:
    return rank_pools.get(2)


def test_a_part_outside_the_whole_or_of_another_dtype_is_refused() -> None:
    for offsets, part, text in (
        ((2, 0), torch.zeros(2, 4), r"of shape \(2, 4\) at \(2, 0\) does not lie in \(3, 4\)"),
        ((0,), torch.zeros(2), "does not lie"),
        ((0, 0), torch.zeros(1, 1, dtype=torch.bfloat16), "has dtype torch.bfloat16, the whole torch.float32"),
    ):
        with pytest.raises(WeightsError, match=text):
            TensorShards(SHAPE, torch.float32, [(offsets, part)])


def test_nobody_can_compute_with_it() -> None:
    parts = TensorShards(SHAPE, torch.float32, [((0, 0), torch.zeros(3, 4))])
    with pytest.raises(TypeError, match="only says which shards"):
        parts.add(1)
    assert repr(parts) == "TensorShards((3, 4), torch.float32, [(3, 4) at (0, 0)])"


class PartsEngine(PlainEngine):
    """Adds to the state a matrix of 12 elements, in the parts that a rank is given."""

    parts: TensorShards

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["model"]["parts"] = self.parts
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state["model"]["parts"]
        super().load_state_dict(state)


def of_rank(rank: int, *, whole: torch.Tensor) -> TensorShards:
    """Deal a matrix out as a flat range would: 5 elements to the first rank, 7 to the second."""
    places = ([((0, 0), (1, 4)), ((1, 0), (1, 1))], [((1, 1), (1, 3)), ((2, 0), (1, 4))])[rank]
    parts = [
        (offsets, whole[offsets[0] : offsets[0] + size[0], offsets[1] : offsets[1] + size[1]])
        for offsets, size in places
    ]
    return TensorShards(SHAPE, torch.float32, parts)


def engine_with(parts: TensorShards) -> PartsEngine:
    engine = make()
    engine.__class__ = PartsEngine
    assert isinstance(engine, PartsEngine)
    engine.parts = parts
    return engine


def save_then_load_otherwise(rank: int, root: Path, wait: bool) -> list[torch.Tensor]:
    whole = torch.arange(12.0).view(SHAPE)
    store = CheckpointStore(root)
    store.save(engine_with(of_rank(rank, whole=whole)), 1, wait=wait)
    if not wait:
        whole.zero_()  # training goes on while the copy is written
    store.wait()
    dealt_otherwise = [((0, 1), torch.zeros(3, 2)), ((2, 3), torch.zeros(1, 1))] if rank else []
    loaded = TensorShards(SHAPE, torch.float32, dealt_otherwise)
    store.load(engine_with(loaded))
    store.close()
    return [part for _, part in loaded.shards]


@pytest.mark.dist
@pytest.mark.parametrize("wait", [True, False])
def test_parts_are_saved_and_loaded_into_other_parts(two: RankPool, tmp_path: Path, wait: bool) -> None:
    nothing, parts = two.run(save_then_load_otherwise, tmp_path, wait)
    assert nothing == []
    assert parts[0].tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    assert parts[1].tolist() == [[11.0]]


def save_twice_held(rank: int, root: Path, is_written: bool) -> str:
    whole = torch.arange(12.0).view(SHAPE)
    parts = (
        TensorShards(SHAPE, torch.float32, [((0, 0), whole)])
        if rank == 0
        else TensorShards(SHAPE, torch.float32, [((1, 0), whole[1:])], is_written=is_written)
    )
    store = CheckpointStore(root)
    try:
        store.save(engine_with(parts), 1, wait=True)
    except WeightsError as error:
        return str(error)
    finally:
        store.close()
    return "saved"


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
def test_what_two_ranks_hold_in_other_shapes_is_written_by_one_of_them(two: RankPool, tmp_path: Path) -> None:
    refusals = two.run(save_twice_held, tmp_path / "both", True)
    assert all("overlap" in text for text in refusals), refusals
    assert two.run(save_twice_held, tmp_path / "one", False) == ["saved", "saved"]
