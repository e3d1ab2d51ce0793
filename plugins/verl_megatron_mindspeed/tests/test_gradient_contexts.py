"""The contexts around the micro-batches of a pipeline, without Megatron."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.micro_batch_pass import MicroBatchPass
from verl_megatron_mindspeed.forward.gradient_contexts import PipelineContexts

if TYPE_CHECKING:
    from collections.abc import Iterator


class Chunk(torch.nn.Module):
    """Stands for Megatron's DistributedDataParallel."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Note when gradients are unreduced."""
        self.events.append("hold")
        try:
            yield
        finally:
            self.events.append("let go")


def contexts(events: list[str], num_micro_batches: int) -> PipelineContexts:
    """Make contexts that note what happens."""

    @contextmanager
    def sync(is_last: bool) -> Iterator[None]:
        events.append(f"enter {is_last}")
        try:
            yield
        finally:
            events.append(f"leave {is_last}")

    batches = [PackedBatch.from_sequences([])] * num_micro_batches
    given = MicroBatchPass(batches, lambda output, _: (output.log_probs, {}), sync)
    return PipelineContexts(given, [Chunk(events)])


def test_the_last_is_entered_when_the_others_are_left() -> None:
    events: list[str] = []
    with contexts(events, 3) as made:
        with made.hold():
            events.append("first backwards")
        events.append("last backward")
    assert events == [
        *["enter False", "enter False", "hold", "first backwards", "let go", "leave False", "leave False"],
        *["enter True", "last backward", "leave True"],
    ]


def test_the_interleaved_schedule_holds_back_again_without_further_contexts() -> None:
    events: list[str] = []
    with contexts(events, 2) as made:
        with made.hold():
            pass
        with made.hold():
            events.append("another part of the model")
    assert events == [
        *["enter False", "hold", "let go", "leave False", "enter True"],
        *["hold", "another part of the model", "let go", "leave True"],
    ]


def test_a_single_micro_batch_is_unreduced_too_since_it_may_be_filled_up() -> None:
    events: list[str] = []
    with contexts(events, 1) as made, made.hold():
        pass
    assert events == ["hold", "let go", "enter True", "leave True"]


def fail_while_holding(made: PipelineContexts) -> None:
    """Raise as a schedule of Megatron's may, which uses no with statement."""
    made.hold().__enter__()
    raise ValueError("boom")


def test_an_exception_leaves_all() -> None:
    events: list[str] = []
    with pytest.raises(ValueError, match="boom"), contexts(events, 3) as made:
        fail_while_holding(made)
    assert events == ["enter False", "enter False", "hold", "let go", "leave False", "leave False"]
