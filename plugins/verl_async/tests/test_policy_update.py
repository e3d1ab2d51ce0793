"""One training step: which optimizer steps it makes, on what, with what loss."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_async.tests.fakes import FakeTrainer, make_group
from verl_async.algorithms.policy_loss import ClippedPolicyLoss
from verl_async.asynchrony.policy_update import PolicyUpdate
from verl_async.config import AlgorithmConfig, TrainerConfig
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.asynchrony.actors import ShareBatches


def update_of(trainer: FakeTrainer, timeout_s: float = 5.0, **algorithm: Any) -> PolicyUpdate:
    config = TrainerConfig(num_steps=1, mini_batch_size=2, max_tokens_per_micro_batch=8, timeout_s=timeout_s)
    return PolicyUpdate(trainer, config, AlgorithmConfig.model_validate(algorithm), temperature=0.7)


def run(update: PolicyUpdate, *rewards: tuple[float, float]) -> Mapping[str, float]:
    return asyncio.run(update.run([make_group(number, pair) for number, pair in enumerate(rewards)]))


def num_sequences(batches: ShareBatches) -> list[list[int]]:
    """Sequences of each share's micro-batches."""
    return [[len(group) for group in share] for share in batches]


def test_each_mini_batch_makes_one_optimizer_step() -> None:
    trainer = FakeTrainer(num_shares=2)
    figures = run(update_of(trainer), (0.0, 1.0), (0.0, 2.0), (0.0, 3.0), (0.0, 4.0))
    assert trainer.num_steps == 2
    # Four sequences of four tokens over two shares: eight tokens a share, which is the budget of a micro-batch.
    assert [num_sequences(batches) for batches in trainer.batches] == [[[2], [2]], [[2], [2]]]
    assert trainer.losses == [ClippedPolicyLoss(0.2, 0.28, None)] * 2
    assert trainer.temperatures == [0.7, 0.7]
    assert figures == {
        "ratio": 2.5,  # mean of 2 and 3
        "loss": 1.5,
        "grad_norm": 0.5,
        "learning_rate": 0.2,  # the last
        "step_applied": 1.0,
        "trained_tokens": 32.0,
    }


def test_a_mini_batch_whose_groups_are_all_left_out_makes_no_step() -> None:
    trainer = FakeTrainer()
    figures = run(update_of(trainer), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (2.0, 2.0))
    assert trainer.num_steps == 1
    assert figures["trained_tokens"] == 8.0
    assert figures["loss"] == 1.0


def test_a_step_without_any_gradient_says_so() -> None:
    trainer = FakeTrainer()
    assert run(update_of(trainer), (1.0, 1.0), (0.0, 0.0)) == {"step_applied": 0.0, "trained_tokens": 0.0}
    assert trainer.num_steps == 0


def test_skipped_steps_are_reported() -> None:
    trainer = FakeTrainer()
    trainer.applied = False
    assert run(update_of(trainer), (0.0, 1.0), (0.0, 1.0))["step_applied"] == 0.0


def test_recomputed_log_probs_are_of_the_weights_at_the_start_of_the_training_step() -> None:
    trainer = FakeTrainer(num_shares=2)
    run(update_of(trainer, old_log_probs="recompute"), (0.0, 1.0), (0.0, 2.0), (0.0, 3.0), (0.0, 4.0))
    assert (trainer.num_inferred, trainer.num_steps) == (2, 2)
    assert trainer.losses == [ClippedPolicyLoss(0.2, 0.28, 2.0)] * 2
    assert trainer.temperatures == [0.7] * 4
    for batches in trainer.batches:
        for one in (one for share in batches for group in share for one in group):
            # FakeTrainer.infer_batch would add -1000 after the first optimizer step.
            assert one.fields["old_log_probs"].tolist() == (-one.token_ids).tolist()


def test_recomputed_log_probs_of_later_steps_are_of_the_weights_of_the_last_sync() -> None:
    trainer = FakeTrainer()
    update = dataclasses.replace(update_of(trainer, old_log_probs="recompute"), sync_step=2)
    for step in range(4):  # of one optimizer step each; a sync comes before the first and the third
        asyncio.run(update.run([make_group(0), make_group(1)], since_sync=step % 2))
    assert trainer.num_steps == 4
    for step, batches in enumerate(trainer.batches):
        synced_at = step - step % 2
        for one in (one for share in batches for group in share for one in group):
            assert one.fields["old_log_probs"].tolist() == (-one.token_ids - 1000.0 * synced_at).tolist()


def test_weights_are_kept_aside_only_where_they_are_needed() -> None:
    for sync_step, old_log_probs in ((1, "recompute"), (2, "rollout")):
        trainer = FakeTrainer()
        update = dataclasses.replace(update_of(trainer, old_log_probs=old_log_probs), sync_step=sync_step)
        for step in range(2):
            asyncio.run(update.run([make_group(0), make_group(1)], since_sync=step % sync_step))
        assert trainer.kept == {}


class Silent(FakeTrainer):
    """Never answers."""

    async def train_batch(self, *_: Any) -> Any:
        await asyncio.sleep(100)

    async def infer_batch(self, *_: Any) -> Any:
        await asyncio.sleep(100)

    async def keep_weights(self, *_: Any) -> Any:
        await asyncio.sleep(100)


def test_a_trainer_that_does_not_answer_is_named() -> None:
    with pytest.raises(
        StuckError, match=r"the trainer did not finish an optimizer step over 4 sequences within 0\.01 s"
    ):
        run(update_of(Silent(), timeout_s=0.01), (0.0, 1.0), (0.0, 1.0))
    with pytest.raises(StuckError, match=r"the trainer did not keep the weights of the last sync aside within 0\.01 s"):
        run(
            dataclasses.replace(update_of(Silent(), timeout_s=0.01, old_log_probs="recompute"), sync_step=2), (0.0, 1.0)
        )
    with pytest.raises(StuckError, match=r"the trainer did not compute the log-probs of 4 sequences within 0\.01 s"):
        run(update_of(Silent(), timeout_s=0.01, old_log_probs="recompute"), (0.0, 1.0), (0.0, 1.0))
