"""Experts divided over two ranks. The release played here computes them in the dtype that it is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import transformers

from plugins.verl_fsdp_turbo.tests.on_ranks import build, prepare, refusal
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import make_sequences
from verl_engine.testing.rank_pool import RankPool
from verl_engine.testing.tiny_models import tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXPERTS: Final[dict[str, Any]] = {
    "expert_parallel_size": 2,
    "ep_plan": {"apply_modules": ["model.layers.{*}.mlp.experts"]},
}


def prepare_newer() -> None:
    """Prepare a process in which the library has the newest release, and one thing more."""
    os.environ["FAKE_FSDP_TURBO_HAS"] = "reset_parallel_state,function_patches,data_mesh,expert_dtype"
    prepare()


@pytest.fixture(scope="module")
def newer(stand_in: Path) -> Iterator[RankPool]:
    assert stand_in.is_dir()
    pool = RankPool(2, prepare=prepare_newer)
    yield pool
    pool.close()


def write_experts(folder: Path, count: int) -> Path:
    """Write a Qwen3 with a mixture of experts."""
    config = transformers.Qwen3MoeConfig(
        **tiny_config(), num_experts=count, num_experts_per_tok=2, moe_intermediate_size=16
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def two_steps(driver: Driver) -> tuple[list[float], dict[str, torch.Tensor]]:
    norms = [driver.train(make_sequences(6, seed=step)).optimizer.grad_norm for step in range(2)]
    return norms, driver.weights()


def divided_and_whole(rank: int, folder: Path, settings: dict[str, Any]) -> Any:
    whole = Driver({"backend": "fsdp2", "device": "cpu", "learning_rate": 1e-2, "eps": 1e-3}, folder, rank, 2)
    return two_steps(build(rank, folder, eps=1e-3, **EXPERTS, **settings)), two_steps(whole)


@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [{}, {"fully_shard_parallel_size": 1}, {"gradient_sync": "every_micro_batch"}],
    ids=["sharded", "copies", "reduced each time"],
)
def test_divided_experts_and_their_routers_train_as_whole_ones(
    tmp_path: Path, newer: RankPool, settings: dict[str, Any]
) -> None:
    folder = write_experts(tmp_path / "moe", 4)
    for (norms, weights), (norms_whole, weights_whole) in newer.run(divided_and_whole, folder, settings):
        assert norms == pytest.approx(norms_whole, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, weights_whole[name], rtol=0, atol=1e-5, msg=name)


def refused(rank: int, folder: Path) -> str:
    return refusal(lambda: build(rank, folder, **EXPERTS))


@pytest.mark.dist
def test_a_single_expert_a_rank_is_refused(tmp_path: Path, newer: RankPool) -> None:
    for message in newer.run(refused, write_experts(tmp_path / "moe", 2)):
        assert "engine.expert_parallel_size=2 does not fit the 2 experts of model.layers.0.mlp.experts" in message
        assert "at least two" in message


@pytest.mark.dist
def test_a_release_that_computes_experts_in_bfloat16_is_found_out(tmp_path: Path, ranks: RankPool) -> None:
    for message in ranks.run(refused, write_experts(tmp_path / "moe", 4)):
        assert "the installed fsdp_turbo computes" in message
        assert message.endswith("set engine.param_dtype=bfloat16")
