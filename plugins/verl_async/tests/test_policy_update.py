"""One training step: which optimizer steps it makes, on what, with what loss."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugins.verl_async.tests.fakes import FakeTrainer, make_group
from verl_async.algorithms.algorithm import Algorithm
from verl_async.config import AlgorithmConfig, KlConfig, TrainerConfig
from verl_async.errors import RewardError
from verl_async.orchestrator.policy_update import PolicyUpdate
from verl_async.orchestrator.workflow import Trajectory
from verl_async.rollout.interface import Generation
from verl_engine.contract.errors import ConfigError, StuckError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from verl_async.orchestrator.actors import RankBatches


def update_of(trainer: FakeTrainer, timeout_s: float = 5.0, **algorithm: Any) -> PolicyUpdate:
    config = TrainerConfig(num_steps=1, mini_batch_size=2, max_tokens_per_micro_batch=8, timeout_s=timeout_s)
    loaded = Algorithm.load(AlgorithmConfig.model_validate(algorithm))
    return PolicyUpdate(trainer, config, loaded, temperature=0.7)


def run(update: PolicyUpdate, *rewards: tuple[float, float]) -> Mapping[str, float]:
    return asyncio.run(update.run([make_group(number, pair) for number, pair in enumerate(rewards)]))


def num_sequences(batches: RankBatches) -> list[list[int]]:
    """Sequences of each data-parallel rank's micro-batches."""
    return [[len(group) for group in rank] for rank in batches]


def test_each_mini_batch_makes_one_optimizer_step() -> None:
    trainer = FakeTrainer(data_parallel_size=2)
    metrics = run(update_of(trainer), (0.0, 1.0), (0.0, 2.0), (0.0, 3.0), (0.0, 4.0))
    assert trainer.num_steps == 2
    # Four sequences of four tokens over two ranks: eight tokens a rank, which is the budget of a micro-batch.
    assert [num_sequences(batches) for batches in trainer.batches] == [[[2], [2]], [[2], [2]]]
    assert trainer.losses == [Algorithm.load(AlgorithmConfig()).loss] * 2
    assert trainer.normalizers == ["tokens"] * 2
    assert set(trainer.batches[0][0][0][0].fields) == {"advantages", "old_log_probs", "rollout_log_probs"}
    assert trainer.temperatures == [0.7, 0.7]
    assert metrics == {
        "ratio": 2.5,  # mean of 2 and 3
        "loss": 1.5,
        "grad_norm": 0.5,
        "learning_rate": 0.2,  # the last
        "step_applied": 1.0,
        "trained_tokens": 32.0,
    }


def test_a_mini_batch_whose_groups_are_all_left_out_makes_no_step() -> None:
    trainer = FakeTrainer()
    metrics = run(update_of(trainer), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (2.0, 2.0))
    assert trainer.num_steps == 1
    assert metrics["trained_tokens"] == 8.0
    assert metrics["loss"] == 1.0


def test_a_step_without_any_gradient_says_so() -> None:
    trainer = FakeTrainer()
    assert run(update_of(trainer), (1.0, 1.0), (0.0, 0.0)) == {"step_applied": 0.0, "trained_tokens": 0.0}
    assert trainer.num_steps == 0


def test_skipped_steps_are_reported() -> None:
    trainer = FakeTrainer()
    trainer.applied = False
    assert run(update_of(trainer), (0.0, 1.0), (0.0, 1.0))["step_applied"] == 0.0


def test_recomputed_log_probs_are_of_the_weights_at_the_start_of_the_training_step() -> None:
    trainer = FakeTrainer(data_parallel_size=2)
    run(update_of(trainer, old_log_probs="recompute"), (0.0, 1.0), (0.0, 2.0), (0.0, 3.0), (0.0, 4.0))
    assert (trainer.num_inferred, trainer.num_steps) == (2, 2)
    assert trainer.temperatures == [0.7] * 4
    for batches in trainer.batches:
        for one in (one for rank in batches for group in rank for one in group):
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
        for one in (one for rank in batches for group in rank for one in group):
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

    async def infer_batch(self, *_: Any, **__: Any) -> Any:
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


def response_fields(trainer: FakeTrainer, name: str) -> list[list[float]]:
    """A field of each sequence trained on, in its response."""
    return [
        one.fields[name][one.loss_mask].tolist()
        for batches in trainer.batches
        for rank in batches
        for group in rank
        for one in group
    ]


def test_a_kl_in_the_loss_brings_log_probs_of_the_reference_to_what_is_trained_on() -> None:
    trainer = FakeTrainer(data_parallel_size=2)
    run(update_of(trainer, kl={}), (0.0, 1.0), (1.0, 1.0))
    assert (trainer.num_inferred, trainer.temperatures) == (1, [0.7, 0.7])
    assert response_fields(trainer, "ref_log_probs") == [[-5.5, -6.0]] * 2  # of tokens 11 and 12
    assert trainer.losses[0] == Algorithm.load(AlgorithmConfig(kl=KlConfig())).loss


@pytest.mark.parametrize("old_log_probs", ["rollout", "recompute"])
def test_a_kl_in_the_reward_is_taken_off_before_the_advantage(old_log_probs: str) -> None:
    # Old log-probs: of the rollout -1 and -2, or -11 and -12 of the fake trainer; of the reference -5.5 and -6.
    # k1 is old - reference: 4.5 + 4 = 8.5, or -5.5 - 6 = -11.5. The second sample has a longer response by one token
    # (13: -3 or -13, reference -6.5): 3.5 or -6.5 more.
    group = make_group(rewards=(0.0, 1.0))
    longer = Trajectory((Generation([11, 12, 13], [-1.0, -2.0, -3.0], [0] * 3, "stop"),))
    group = dataclasses.replace(group, trajectories=(group.trajectories[0], longer))
    trainer = FakeTrainer()
    kl = {"estimator": "k1", "coefficient": 0.1, "where": "reward"}
    settings: dict[str, Any] = {"kl": kl, "advantage": "dr_grpo", "old_log_probs": old_log_probs}
    metrics = asyncio.run(update_of(trainer, **settings).run([group]))
    short, long = (8.5, 12.0) if old_log_probs == "rollout" else (-11.5, -18.0)
    half = (1 - 0.1 * (long - short)) / 2
    found = sorted(response_fields(trainer, "advantages"), key=len)
    assert found == [pytest.approx([-half] * 2), pytest.approx([half] * 3)]
    assert metrics["reward_kl"] == pytest.approx((short / 2 + long / 3) / 2)
    assert trainer.num_inferred == (1 if old_log_probs == "rollout" else 2), "each is computed once"
    assert "ref_log_probs" not in trainer.batches[0][0][0][0].fields, "the loss does not read it"


def test_groups_of_equal_rewards_differ_by_their_kl() -> None:
    trainer = FakeTrainer()
    run(update_of(trainer, kl={"where": "reward"}), (1.0, 1.0))
    assert trainer.num_steps == 0, "the samples are alike"


def test_the_normaliser_is_the_jobs() -> None:
    trainer = FakeTrainer()
    run(update_of(trainer, loss_normalizer=64), (0.0, 1.0), (0.0, 1.0))
    assert trainer.normalizers == [64.0]


OWN = """
import torch

from verl_async.algorithms.columns import with_columns
from verl_engine.contract.strict_model import StrictModel


class Config(StrictModel):
    weight: float = 1.0


class Formed:
    Config = Config
    columns = ("reward/format", "rollout_log_probs")

    def __init__(self, config):
        self.weight = config.weight

    def __call__(self, group):
        formats, log_probs = group.columns["reward/format"], group.columns["rollout_log_probs"]
        return [r + self.weight * f + p for r, f, p in zip(group.rewards, formats, log_probs)]


def leave_one_out(group):
    rewards = group.rewards
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def few(group):
    return group.rewards[:1]


def long(group):
    return [torch.zeros(7)] * len(group.rewards)


def endless(group):
    return group.rewards / 0


def nothing(group):
    return None


def listed(group):
    return [1.0, 0.0]


@with_columns("advantages")
def circular(group):
    return group.rewards


@with_columns("reward/format")
def formal(output, batch):
    return output.log_probs.sum() * 0, {}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_advantages_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_an_advantage_of_ones_own_reads_columns_and_numbers_of_the_reward(own: str) -> None:
    group = dataclasses.replace(make_group(rewards=(0.0, 1.0)), metrics=({"format": 0.25}, {"format": 0.5}))
    trainer = FakeTrainer()
    settings: dict[str, Any] = {"advantage": f"{own}:Formed", "advantage_config": {"weight": 10.0}}
    asyncio.run(update_of(trainer, **settings).run([group]))
    # Reward + 10 * format + log-prob of each token, -1 and -2.
    assert response_fields(trainer, "advantages") == [[1.5, 0.5], [5.0, 4.0]]
    assert set(trainer.batches[0][0][0][0].fields) == {"advantages", "old_log_probs", "rollout_log_probs"}


def test_an_advantage_of_ones_own_may_be_a_function(own: str) -> None:
    trainer = FakeTrainer()
    run(update_of(trainer, advantage=f"{own}:leave_one_out"), (0.0, 1.0), (1.0, 1.0))
    assert response_fields(trainer, "advantages") == [[-1.0, -1.0], [1.0, 1.0]], "and groups of zeros are left out"
    run(update_of(trainer, advantage=f"{own}:listed"), (1.0, 1.0))
    assert response_fields(trainer, "advantages")[2:] == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", "few gave 1 advantages for a group of 2 samples"),
        ("long", r"gave a sample of 2 tokens advantages of shape \[7\]; expected one number, or one for each token"),
        ("endless", "gave .*nan.*, which is not finite in float32"),
        ("nothing", "gave None; expected a number, or a tensor, for each sample"),
    ],
)
def test_an_advantage_that_fits_no_group_is_named(own: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(update_of(FakeTrainer(), advantage=f"{own}:{name}"), (0.0, 1.0))


def test_columns_that_there_are_not_are_named(own: str) -> None:
    with pytest.raises(ConfigError, match=r"asks for the column 'advantages'; there are rollout_log_probs, old_log"):
        update_of(FakeTrainer(), advantage=f"{own}:circular")
    update = update_of(FakeTrainer(), loss=f"{own}:formal")
    with pytest.raises(RewardError, match=r"sample 0-0: .*asks for reward/format, .*no 'format'; .*no other numbers"):
        run(update, (0.0, 1.0))
    group = dataclasses.replace(make_group(), metrics=({"form": 1.0}, {"form": 1.0}))
    with pytest.raises(RewardError, match="beside the score it returned form"):
        asyncio.run(update.run([group]))


class Noting(FakeTrainer):
    """Notes the experts that come with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.came: dict[str, list[Any]] = {}

    def note(self, call: str, batches: RankBatches) -> None:
        found = [one.fields["routed_experts"].flatten().tolist() for [group] in batches for one in group]
        self.came.setdefault(call, []).append(found)

    async def train_batch(self, batches: RankBatches, *rest: Any) -> Any:
        self.note("train", batches)
        return await super().train_batch(batches, *rest)

    async def infer_batch(self, batches: RankBatches, *rest: Any, **named: Any) -> Any:
        self.note("old", batches)
        return await super().infer_batch(batches, *rest, **named)

    async def infer_reference(self, batches: RankBatches, *rest: Any) -> Any:
        self.note("reference", batches)
        return await super().infer_reference(batches, *rest)


def test_all_forwards_get_the_experts_of_the_rollout() -> None:
    group = make_group()
    turns = (group.trajectories[0].generations[0], group.trajectories[1].generations[0])
    for number, turn in enumerate(turns):
        turn.routed_experts = np.array([1, 2, 3 + number], np.uint8)[:, None, None]
    trainer = Noting()
    update = update_of(trainer, kl={}, old_log_probs="recompute")
    asyncio.run(dataclasses.replace(update, with_experts=True).run([group]))
    assert trainer.came == {call: [[[1, 2, 3, 3], [1, 2, 4, 4]]] for call in ("old", "reference", "train")}
