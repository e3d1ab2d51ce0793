"""Prompts in the order of training."""

from __future__ import annotations

import pytest

from plugins.verl_async.tests.fakes import encoded_prompts
from verl_async.orchestrator.prompt_source import PromptSource


def test_rows_as_they_stand_epoch_after_epoch() -> None:
    source = PromptSource(encoded_prompts(3), seed=0, shuffle=False)
    draws = [source.draw(number) for number in range(7)]
    assert [draw.number for draw in draws] == list(range(7))
    assert [draw.encoded.prompt.index for draw in draws] == [0, 1, 2, 0, 1, 2, 0]


def test_each_shuffled_epoch_has_every_row_once_and_its_own_order() -> None:
    source = PromptSource(encoded_prompts(20), seed=1, shuffle=True)
    rows = [source.draw(number).encoded.prompt.index for number in range(40)]
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(20))
    assert rows[:20] != rows[20:]


def test_the_order_follows_from_the_seed() -> None:
    def rows(seed: int) -> list[int]:
        source = PromptSource(encoded_prompts(20), seed, shuffle=True)
        return [source.draw(number).encoded.prompt.index for number in range(20)]

    assert rows(1) == rows(1) != rows(2)


def test_a_draw_out_of_order_is_refused() -> None:
    source = PromptSource(encoded_prompts(3), seed=0, shuffle=False)
    source.draw(0)
    with pytest.raises(AssertionError, match="instances are made in order"):
        source.draw(2)
