"""The reference policy of a trainer rank stays what training began with, whatever it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from examples.addition_data import save_model
from verl_async.algorithms.algorithm import Algorithm
from verl_async.algorithms.reference_policy import forward_only
from verl_async.config import AlgorithmConfig, KlConfig
from verl_async.ray.trainer import TrainerActor
from verl_engine.batch.sequence import Sequence
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks

pytestmark = pytest.mark.dist


def train(rank: int, world_size: int, model: Path, engine: dict[str, Any]) -> list[list[float]]:
    """Log-probs of policy, reference, both after two steps, and what the loss says of the KL in each."""
    config = Fsdp2Config.model_validate({"backend": "fsdp2", "learning_rate": 1e-2, "device": "cpu", **engine})
    actor = TrainerActor(config, model, rank, world_size, None if config.lora else forward_only(config))
    actor.start("file:///not/used", 60.0)
    fields = {name: np.full(6, value, np.float32) for name, value in {"advantages": 1.0, "old_log_probs": -1.0}.items()}
    fields["rollout_log_probs"] = fields["old_log_probs"]
    plain = Sequence(np.arange(1, 7) + rank, np.arange(6) > 1, fields)
    before = (actor.infer_batch([[plain]], 1.0, None)[0][0], actor.infer_reference([[plain]], 1.0)[0][0])
    loss = Algorithm.load(AlgorithmConfig(kl=KlConfig(coefficient=0.5, estimator="k2"))).loss
    one = Sequence(plain.token_ids, plain.loss_mask, {**fields, "ref_log_probs": before[1]})
    reports = [actor.train_batch([[one]], loss, 1.0, "sequences") for _ in range(2)]
    after = (actor.infer_batch([[plain]], 1.0, None)[0][0], actor.infer_reference([[plain]], 1.0)[0][0])
    actor.close()
    return [*(values.tolist() for values in (*before, *after)), [report.metrics["kl"] for report in reports]]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("engine", [{}, {"lora": {"rank": 4}}], ids=["second engine", "adapter off"])
def test_it_is_the_model_that_training_began_with(
    engine: dict[str, Any], world_size: int, tmp_path: Path, on_ranks: OnRanks
) -> None:
    save_model(tmp_path / "model", seed=0)
    for policy, reference, trained, still, kl in on_ranks(
        train, world_size, tmp_path / "model", engine, world_size=world_size
    ):
        assert policy == reference == still
        assert max(abs(np.subtract(trained, still))) > 1e-3
        assert kl[0] == 0
        assert kl[1] > 0
