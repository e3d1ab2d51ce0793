"""Packing: what lies where, and that nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_engine.batch.packed import PackedBatch, SegmentRun
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError

if TYPE_CHECKING:
    import numpy.typing as npt


def make(tokens: list[int], **fields: list[float]) -> Sequence:
    """Build a sequence whose every token but the first is in the loss."""
    mask = np.ones(len(tokens), np.bool_)
    mask[0] = False
    return Sequence(np.array(tokens), mask, {name: np.array(values, np.float32) for name, values in fields.items()})


def test_packing_worked_by_hand() -> None:
    batch = PackedBatch.from_sequences([make([7, 8, 9]), make([1, 2]), make([3, 4])])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert batch.loss_positions.tolist() == [1, 3, 5, 6]
    assert batch.segment_runs == (SegmentRun(0, 2, 2), SegmentRun(4, 1, 3))
    assert batch.order == (1, 2, 0)
    assert batch.num_tokens == 7


def test_an_empty_micro_batch_is_one_token_outside_the_loss() -> None:
    batch = PackedBatch.from_sequences([])
    assert batch.num_tokens == 1
    assert not batch.loss_mask.any()


def test_fields_follow_their_tokens() -> None:
    batch = PackedBatch.from_sequences([make([7, 8, 9], adv=[0, 0.1, 0.2]), make([1, 2], adv=[0, 0.5])])
    assert batch.fields["adv"].tolist() == pytest.approx([0, 0.5, 0, 0.1, 0.2])


def test_sequences_must_agree_on_their_fields() -> None:
    with pytest.raises(BatchError, match=r"sequence 1 has no fields, but sequence 0 has fields adv float32"):
        PackedBatch.from_sequences([make([1, 2], adv=[0, 1]), make([1, 2])])


def test_the_first_token_cannot_be_in_the_loss() -> None:
    with pytest.raises(BatchError, match=r"loss_mask\[0\] is True"):
        Sequence(np.array([1, 2]), np.array([True, True]))


def test_fields_must_be_as_long_as_the_tokens() -> None:
    with pytest.raises(BatchError, match=r"adv has shape \(3,\), but the sequence has 2 tokens"):
        make([1, 2], adv=[1, 2, 3])


def with_field(tokens: list[int], field: npt.NDArray[Any], positions: npt.NDArray[np.int64] | None = None) -> Sequence:
    return Sequence(np.array(tokens), np.arange(len(tokens)) > 0, {"field": field}, positions)


def test_fields_keep_shape_and_dtype_and_follow_their_tokens() -> None:
    first = np.arange(18, dtype=np.int32).reshape(3, 2, 3)
    batch = PackedBatch.from_sequences([with_field([7, 8, 9], first), with_field([1, 2], -first[:2])])
    assert batch.fields["field"].dtype == torch.int32
    assert torch.equal(batch.fields["field"], torch.from_numpy(np.concatenate([-first[:2], first])))
    assert [part.shape for part in batch.unpack(batch.fields["field"])] == [(3, 2, 3), (2, 2, 3)]


def test_fields_must_agree_on_shape_and_dtype() -> None:
    first = with_field([1, 2], np.zeros((2, 3), np.int64))
    for other, kind in ((np.zeros((2, 4), np.int64), r"int64\[4\]"), (np.zeros((2, 3), np.float32), r"float32\[3\]")):
        with pytest.raises(
            BatchError, match=rf"sequence 1 has fields field {kind}, but sequence 0 has fields field int64"
        ):
            PackedBatch.from_sequences([first, with_field([1, 2], other)])


def test_own_positions_take_the_place_of_counted_ones() -> None:
    field = np.zeros(2, np.float32)
    flat = [with_field([1, 2], field, np.array([4, 3])), with_field([1, 2], field, np.array([0, 9]))]
    batch = PackedBatch.from_sequences(flat)
    assert (batch.position_ids.tolist(), batch.has_own_positions) == ([4, 3, 0, 9], True)
    axes = [with_field([1, 2], field, np.array([[4, 3], [1, 1], [2, 0]]))] * 2
    assert PackedBatch.from_sequences(axes).position_ids.tolist() == [[4, 3] * 2, [1, 1] * 2, [2, 0] * 2]
    assert not PackedBatch.from_sequences([]).has_own_positions
    with pytest.raises(BatchError, match="positions of its own"):
        PackedBatch.from_sequences([flat[0], axes[0]])
    with pytest.raises(
        BatchError, match=r"positions, along its last dim, has shape \(3,\), but the sequence has 2 tokens"
    ):
        with_field([1, 2], field, np.zeros((2, 3), np.int64))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_loss_token_has_a_temperature_above_0(value: float) -> None:
    make([1, 2], temperature=[value, 1.0])  # the first token is not in the loss
    with pytest.raises(BatchError, match="temperature is not above 0"):
        make([1, 2], temperature=[1.0, value])


def test_ids_are_0_or_more_and_the_highest_is_known() -> None:
    with pytest.raises(BatchError, match="token_ids has -1; ids are 0 or more"):
        make([1, -1])
    chosen = Sequence(np.array([1, 2]), np.array([False, True]), {"top_k_ids": np.array([[3], [40]])})
    assert PackedBatch.from_sequences([chosen]).highest_id == 40
    assert PackedBatch.from_sequences([make([5, 7]), make([6])]).highest_id == 7


def test_sequences_with_loss_tokens_are_counted() -> None:
    silent = Sequence(np.array([1, 2, 3]), np.zeros(3, np.bool_))
    assert PackedBatch.from_sequences([make([1, 2]), silent, make([4, 5, 6, 7])]).num_loss_sequences == 2
    assert PackedBatch.from_sequences([]).num_loss_sequences == 0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_unpack_undoes_packing(lengths: list[int]) -> None:
    sequences = [make(list(range(100 * index, 100 * index + length))) for index, length in enumerate(lengths)]
    batch = PackedBatch.from_sequences(sequences)
    for part, sequence in zip(batch.unpack(batch.input_ids), sequences, strict=True):
        assert torch.equal(part, torch.from_numpy(sequence.token_ids))
    assert sum(sequence.num_loss_tokens for sequence in sequences) == int(batch.loss_mask.sum())
