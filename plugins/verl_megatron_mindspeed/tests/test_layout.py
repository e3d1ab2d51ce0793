"""What goes into the model, and which of its output is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugins.verl_megatron_mindspeed.tests.engines import engine_of, new_driver
from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.testing.conformance.reference import make_sequences

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist


def small_batch() -> PackedBatch:
    """Tokens 10..12 and 20..26; those of index 2 of the first and 3 and 6 of the second are in the loss."""
    first = Sequence(np.arange(10, 13), np.array([False, False, True]))
    second = Sequence(np.arange(20, 27), np.isin(np.arange(7), [3, 6]))
    return PackedBatch.from_sequences([first, second])


def check_split_by_context(rank: int, folder: Path) -> None:
    """Two ranks take pieces of both sequences, filled up to 4 and 8 tokens."""
    from verl_megatron_mindspeed.forward.layout import lay_out

    parallel = engine_of(new_driver(folder, rank, context_parallel_size=2)).parallel
    layout = lay_out(small_batch(), parallel, sequence_parallel=False)
    assert layout.packed.cu_seqlens_q.tolist() == [0, 4, 12]
    assert layout.packed.max_seqlen_q == 8
    ids, positions = layout.input_ids[0].tolist(), layout.position_ids[0].tolist()
    if rank == 0:  # pieces 0 and 3: tokens 0 and 3 of the first, 0, 1, 6 and 7 of the second
        assert ids == [10, 0, 20, 21, 26, 0]
        assert positions == [0, 3, 0, 1, 6, 7]
        # None of its tokens comes before a loss token: one row that predicts nothing is left.
        assert layout.rows.tolist() == [0]
        assert layout.loss_positions.tolist() == []
    else:
        assert ids == [11, 12, 22, 23, 24, 25]
        assert positions == [1, 2, 2, 3, 4, 5]
        assert layout.rows.tolist() == [0, 2, 5]  # tokens 11, 22 and 25, before 12, 23 and 26
        assert layout.targets.tolist() == [[12], [23], [26]]
        assert layout.loss_positions.tolist() == [2, 6, 9]


def test_ranks_that_split_sequences_predict_what_follows_their_own_tokens(ranks: RankPool, model_folder: Path) -> None:
    ranks.run(check_split_by_context, model_folder)


def check_filled_up(rank: int, folder: Path) -> None:
    """With sequence parallelism the number of tokens is made even by a sequence of filling."""
    from verl_megatron_mindspeed.forward.layout import lay_out

    parallel = engine_of(new_driver(folder, rank, tensor_parallel_size=2, sequence_parallel=True)).parallel
    batch = PackedBatch.from_sequences([Sequence(np.arange(10, 13), np.array([False, False, True]))])
    layout = lay_out(batch, parallel, sequence_parallel=True)
    assert layout.input_ids.tolist() == [[10, 11, 12, 0]]
    assert layout.packed.cu_seqlens_q.tolist() == [0, 3, 4]
    assert layout.rows.tolist() == [1]


def test_sequence_parallelism_fills_up_with_a_sequence_of_its_own(ranks: RankPool, model_folder: Path) -> None:
    ranks.run(check_filled_up, model_folder)


def output_rows(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return how many rows the output layer gave for each micro-batch, and how many loss tokens there are."""
    driver = new_driver(folder, rank, **settings)
    shapes: list[int] = []
    layer = engine_of(driver).model.parts()[-1].output_layer
    layer.register_forward_hook(lambda _layer, _args, output: shapes.append(output[0].shape[0]))
    micro_batches = driver.micro_batches(make_sequences(8), 3)
    driver.step(micro_batches)
    return shapes, [sum(sequence.num_loss_tokens for sequence in group) for group in micro_batches]


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2, "sequence_parallel": True}], ids=["DP2", "SP2"])
def test_logits_of_loss_tokens_only_are_computed(ranks: RankPool, model_folder: Path, settings: dict[str, Any]) -> None:
    for found, right in ranks.run(output_rows, model_folder, settings):
        assert found == right
