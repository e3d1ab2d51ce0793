"""The optimizer groups of a checkpoint are those of fsdp2 with the same config: else it could not go on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from plugins.verl_megatron_mindspeed.tests.engines import new_driver

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist


def _decays(rank: int, folder: Path, weight_decay: float) -> list[float]:
    state = new_driver(folder, rank, weight_decay=weight_decay).engine.state_dict()
    return [group["weight_decay"] for group in state["optimizer"]["param_groups"]]


def test_vectors_are_a_group_of_their_own_only_where_they_are_spared(ranks: RankPool, model_folder: Path) -> None:
    assert ranks.run(_decays, model_folder, 0.1) == [[0.1, 0.0]] * 2
    assert ranks.run(_decays, model_folder, 0.0) == [[0.0]] * 2
