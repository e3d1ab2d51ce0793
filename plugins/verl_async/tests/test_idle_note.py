"""Why both sides waited."""

from __future__ import annotations

import re

import pytest

from verl_async.config import AsyncTrainingConfig
from verl_async.orchestrator.idle_note import idle_note

CONFIG = AsyncTrainingConfig(staleness_threshold=0.5, trigger_parameter_sync_step=2, queue_size=3)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("staleness", r"raise async_training.staleness_threshold \(0.5\) or trigger_parameter_sync_step \(2\)"),
        ("queue", r"raise async_training.queue_size \(3\)"),
        ("room", "raise reward.num_processes"),
    ],
)
def test_what_the_next_prompt_waited_for_longest_is_the_reason(reason: str, advice: str) -> None:
    waited_s = {"room": 1.0, "queue": 1.0, "staleness": 1.0, reason: 2.0}
    note = idle_note(0.4, 0.25, waited_s, CONFIG)
    assert note is not None
    assert note.startswith("the trainer was idle for 40% of the time and the rollout workers for 25%: ")
    assert re.search(advice, note)


@pytest.mark.parametrize("idle", [(0.9, 0.1), (0.1, 0.9), (0.0, 0.0)])
def test_where_one_side_is_busy_nothing_is_said(idle: tuple[float, float]) -> None:
    assert idle_note(*idle, {"room": 1.0, "queue": 0.0, "staleness": 9.0}, CONFIG) is None
