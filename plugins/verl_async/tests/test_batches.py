"""From scored groups to the sequences that the trainer computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.verl_async.tests.fakes import learned, make_group
from verl_async.orchestrator.batches import BatchPlan, with_column, without_fields
from verl_engine.batch.sequence import Sequence


def plain_sequences(lengths: list[int]) -> list[Sequence]:
    return [Sequence(np.full(length, index), np.arange(length) > 0) for index, length in enumerate(lengths)]


def test_sequences_worked_by_hand() -> None:
    low, high = learned([make_group(rewards=(0.0, 1.0))], advantage="dr_grpo")
    assert low.token_ids.tolist() == [10, 10, 11, 12]
    assert low.token_ids.dtype == np.int64
    assert low.loss_mask.tolist() == [False, False, True, True]
    assert low.fields["advantages"].tolist() == [0.0, 0.0, -0.5, -0.5]
    assert high.fields["advantages"].tolist() == [0.0, 0.0, 0.5, 0.5]
    assert low.fields["rollout_log_probs"].tolist() == low.fields["old_log_probs"].tolist() == [0.0, 0.0, -1.0, -2.0]
    assert {array.dtype for array in low.fields.values()} == {np.dtype(np.float32)}


def test_advantages_are_divided_by_the_standard_deviation_if_so_configured() -> None:
    sequences = learned([make_group(rewards=(0.0, 1.0))])
    expected = 0.5 / (np.sqrt(0.5) + 1e-6)  # the unbiased std of 0 and 1 is sqrt(1/2)
    assert [one.fields["advantages"][-1] for one in sequences] == pytest.approx([-expected, expected])


def test_groups_of_equal_rewards_are_left_out_if_so_configured() -> None:
    groups = [make_group(0, (1.0, 1.0)), make_group(1, (0.0, 3.0)), make_group(2, (0.0, 0.0))]
    assert len(learned(groups, drop_uniform_groups=True)) == 2
    kept = learned(groups, drop_uniform_groups=False)
    assert len(kept) == 6
    assert [one.fields["advantages"][-1] == 0 for one in kept] == [True, True, False, False, True, True]
    assert learned(groups[:1], drop_uniform_groups=True) == []


def test_a_column_is_added_and_nothing_else_changes() -> None:
    sequences = learned([make_group()])
    old = [np.full(4, value, np.float32) for value in (-3.0, -4.0)]
    for before, after, values in zip(sequences, with_column(sequences, "ref_log_probs", old), old, strict=True):
        assert after.fields["ref_log_probs"] is values
        assert after.fields["advantages"] is before.fields["advantages"]
        assert after.token_ids is before.token_ids
        assert "ref_log_probs" not in before.fields
    assert [set(one.fields) for one in without_fields(sequences, frozenset({"advantages", "other"}))] == [
        {"rollout_log_probs", "old_log_probs"}
    ] * 2


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    data_parallel_size=st.integers(1, 4),
    budget=st.integers(1, 20),
)
def test_every_sequence_is_computed_once_and_results_come_back_in_order(
    lengths: list[int], data_parallel_size: int, budget: int
) -> None:
    sequences = plain_sequences(lengths)
    plan = BatchPlan.of(sequences, data_parallel_size, budget)
    batches = plan.pick(sequences)
    assert len(batches) == data_parallel_size
    assert len({len(rank) for rank in batches}) == 1, "every rank has as many micro-batches"
    results = [[[one.token_ids.astype(np.float32) for one in group] for group in rank] for rank in batches]
    restored = plan.restore(results)
    assert [(len(values), values[0]) for values in restored] == [(length, i) for i, length in enumerate(lengths)]


def test_results_that_do_not_fit_the_plan_are_refused() -> None:
    plan = BatchPlan([[[0], [1]]])
    with pytest.raises(ValueError, match="zip"):
        plan.restore([[[np.zeros(1, np.float32)]]])


def test_rewards_whose_squares_no_float32_holds_have_advantages_too() -> None:
    sequences = learned([make_group(rewards=(0.0, 1e30))])
    assert [one.fields["advantages"][-1] for one in sequences] == pytest.approx([-np.sqrt(0.5), np.sqrt(0.5)])
