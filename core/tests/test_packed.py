"""Packing: what lies where, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_engine.batch.packed import PackedBatch, SegmentRun
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError


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
    with pytest.raises(BatchError, match=r"sequence 1 has fields \[\], but sequence 0 has \['adv'\]"):
        PackedBatch.from_sequences([make([1, 2], adv=[0, 1]), make([1, 2])])


def test_the_first_token_cannot_be_in_the_loss() -> None:
    with pytest.raises(BatchError, match=r"loss_mask\[0\] is True"):
        Sequence(np.array([1, 2]), np.array([True, True]))


def test_fields_must_be_as_long_as_the_tokens() -> None:
    with pytest.raises(BatchError, match=r"adv has shape \(3,\), but the sequence has 2 tokens"):
        make([1, 2], adv=[1, 2, 3])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_unpack_undoes_packing(lengths: list[int]) -> None:
    sequences = [make(list(range(100 * index, 100 * index + length))) for index, length in enumerate(lengths)]
    batch = PackedBatch.from_sequences(sequences)
    for part, sequence in zip(batch.unpack(batch.input_ids), sequences, strict=True):
        assert torch.equal(part, torch.from_numpy(sequence.token_ids))
    assert sum(sequence.num_loss_tokens for sequence in sequences) == int(batch.loss_mask.sum())
