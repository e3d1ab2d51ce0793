"""Supervised training on fakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from plugins.verl_async.tests.fake_rollout import FakeRollout
from plugins.verl_async.tests.fakes import FakeListener, FakeTexts, FakeTrainer, encoded_prompts, evaluation_section
from verl_async.algorithms.sft_loss import sft_loss
from verl_async.config import SftJob
from verl_async.orchestrator.assembly import Actors, Watchers, assemble_supervised
from verl_async.orchestrator.timeline import Timeline
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from verl_async.orchestrator.inputs import ModelTexts


def sft_job(num_steps: int = 3, timeout_s: float = 5.0, **evaluation: Any) -> SftJob:
    """Two of three examples a step."""
    return SftJob.model_validate(
        {
            "model": {"path": Path("some/model")},
            "engine": EngineConfig(backend="toy", learning_rate=0.1),
            "data": {"examples": Path("examples.jsonl"), "shuffle": False},
            "trainer": {"num_steps": num_steps, "batch_size": 2, "timeout_s": timeout_s},
            "evaluation": evaluation_section(**evaluation) if evaluation else None,
        }
    )


class Run:
    """A job on fakes, run to its end."""

    def __init__(self, job: SftJob, trainer: FakeTrainer | None = None) -> None:
        self.trainer = trainer or FakeTrainer()
        self.rollouts = [FakeRollout()] if job.evaluation else []
        self.listener, self.timeline = FakeListener(), Timeline()
        examples = [Sequence(np.full(4, index), np.arange(4) > 1) for index in range(3)]
        training = assemble_supervised(
            job,
            cast("ModelTexts", FakeTexts()),
            examples,
            {"sums": encoded_prompts(2)} if job.evaluation else {},
            Actors(self.trainer, self.rollouts),
            Watchers(self.listener, self.timeline),
        )
        asyncio.run(asyncio.wait_for(training.run(), 10.0))


def test_batches_follow_the_order_of_the_examples() -> None:
    run = Run(sft_job())
    drawn = [sorted(int(one.token_ids[0]) for one in batches[0][0]) for batches in run.trainer.batches]
    assert drawn == [[0, 1], [0, 2], [1, 2]]
    assert run.trainer.losses == [sft_loss] * 3
    assert run.trainer.temperatures == [1.0] * 3
    assert {span.what for span in run.timeline.spans} == {"train"}


def test_figures_of_a_step() -> None:
    *_, last = Run(sft_job()).listener.steps
    speed, seconds = last.pop("tokens_per_s"), last.pop("seconds")
    assert speed == pytest.approx(8 / seconds)
    assert last == {"loss": 3.0, "grad_norm": 0.5, "learning_rate": pytest.approx(0.3), "step_applied": 1.0}


def test_each_evaluation_is_of_the_weights_at_that_step() -> None:
    run = Run(sft_job(every_steps=2))
    assert [step for step, _ in run.listener.evaluations] == [0, 2, 3]
    assert run.rollouts[0].version == 2
    assert {span.what for span in run.timeline.spans} >= {"train", "sync weights", "evaluate"}


def test_training_ends_at_its_aim() -> None:
    assert Run(sft_job(stop_at_exact_match=0.5)).listener.steps == []  # reached at the start
    assert len(Run(sft_job(every_steps=1)).listener.steps) == 3


def test_a_trainer_that_does_not_answer_is_named() -> None:
    with pytest.raises(
        StuckError, match=r"the trainer did not finish an optimizer step over 2 examples within 0\.01 s"
    ):
        Run(sft_job(timeout_s=0.01), FakeTrainer(step_s=100))
