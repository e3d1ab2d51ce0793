"""Engines without gradients and optimizer: reference policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from plugins.verl_fsdp.tests.refusals import message_of
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate
from verl_engine.testing.conformance.driver import Driver, same
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks

SECTION = {"backend": "fsdp2", "learning_rate": 1e-2, "device": "cpu"}


def log_probs(rank: int, folder: Path, dtype: str) -> dict[str, Any]:
    """Those of a forward-only engine, and of one that trains."""
    sequences = make_sequences(5)
    driver = Driver({**SECTION, "param_dtype": dtype, "forward_only": True}, folder, rank, 2)
    engine: Any = driver.engine
    return {
        "forward_only": driver.infer(sequences),
        "training": Driver({**SECTION, "param_dtype": dtype}, folder, rank, 2).infer(sequences),
        "dtypes": {str(entry.dtype) for entry in engine.parameters.values()},
        "exported": {str(tensor.dtype) for tensor in driver.weights().values()},
        "requires_grad": any(entry.requires_grad for entry in engine.parameters.values()),
        "bytes": sum(entry.to_local().nbytes for entry in engine.parameters.values()),
    }


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_equal_those_of_a_training_engine(model_folder: Path, dtype: str, on_ranks: OnRanks) -> None:
    model = load_reference(model_folder)
    num_bytes = sum(entry.numel() for entry in model.parameters()) * (2 if dtype == "bfloat16" else 4)
    ranks = on_ranks(log_probs, model_folder, dtype)
    for found in ranks:
        assert all(
            torch.equal(mine, right) for mine, right in zip(found["forward_only"], found["training"], strict=True)
        )
        assert found["dtypes"] == found["exported"] == {f"torch.{dtype}"}
        assert not found["requires_grad"]
        for sequence, mine in zip(make_sequences(5), found["forward_only"], strict=True):
            assert float((mine - masked_log_probs(model, sequence)).abs().max()) <= (
                1e-5 if dtype == "float32" else 0.1
            )
    assert sum(found["bytes"] for found in ranks) == num_bytes


def refusals(rank: int, folder: Path) -> list[str]:
    """What training such an engine says."""
    driver = Driver({**SECTION, "forward_only": True}, folder, rank, 2)
    engine: Any = driver.engine
    return [
        message_of(lambda: driver.train(make_sequences(4))),
        message_of(lambda: engine.optimizer),
        message_of(driver.engine.disable_adapter),
    ]


@pytest.mark.dist
def test_training_is_refused(model_folder: Path, on_ranks: OnRanks) -> None:
    for train, optimizer, adapter in on_ranks(refusals, model_folder):
        assert train == optimizer == "engine.forward_only=true: this engine has no optimizer and cannot train"
        assert adapter == "engine.lora is not set: this engine has no adapter"


def refreshed(rank: int, folder: Path) -> dict[str, bool]:
    """Refresh a reference policy from the policy in training, whole and in parts; keep and restore its weights."""
    policy = Driver(SECTION, folder, rank, 2)
    reference = Driver({**SECTION, "forward_only": True}, folder, rank, 2)
    sequences = make_sequences(4)
    at_first = reference.weights()
    policy.train(make_sequences(8))
    snapshots = reference.snapshots()
    snapshots.save("at first")
    weights_id = reference.engine.weights_id
    reference.engine.load_full_weights(policy.weights().items())
    found = {
        "changed": not same(reference.weights(), at_first),
        "noted": reference.engine.weights_id != weights_id,
        "whole": same(reference.weights(), policy.weights()),
        "used": all(
            torch.equal(*pair) for pair in zip(reference.infer(sequences), policy.infer(sequences), strict=True)
        ),
    }
    snapshots.restore("at first")
    found["restored"] = same(reference.weights(), at_first)
    reference.engine.load_weight_shards(policy.engine.weight_shards())
    found["parts"] = same(reference.weights(), policy.weights())
    with snapshots.swapped("at first"):
        found["swapped"] = same(reference.weights(), at_first)
    reference.engine.move(to_cpu=True)
    reference.engine.move(to_cpu=False)
    found["moved"] = same(reference.weights(), policy.weights())
    return found


@pytest.mark.dist
def test_a_reference_policy_is_refreshed_kept_and_restored(model_folder: Path, on_ranks: OnRanks) -> None:
    for found in on_ranks(refreshed, model_folder):
        assert all(found.values()), found


def state(rank: int, folder: Path) -> tuple[list[str], bool, bool]:
    """What its state holds, and whether another engine's takes its place."""
    first = Driver({**SECTION, "forward_only": True}, folder, rank, 2)
    first.engine.load_full_weights((name, tensor + 1) for name, tensor in first.weights().items())
    second = Driver({**SECTION, "forward_only": True}, folder, rank, 2)
    state = first.engine.state_dict()
    kinds = [name for name in state if name in ("optimizer", "schedule", "loss_scaler")]
    second.engine.load_state_dict(state)
    return kinds, same(first.weights(), second.weights()), first.engine.weights_id > 0


@pytest.mark.dist
def test_its_state_is_the_model_alone(model_folder: Path, on_ranks: OnRanks) -> None:
    assert on_ranks(state, model_folder) == [([], True, True)] * 2


def test_an_adapter_that_nobody_trains_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora is for training, and forward_only=true"):
        validate(Fsdp2Config, {**SECTION, "forward_only": True, "lora": {}}, at="engine")
