"""The optimizer step: norms over any division of the ranks, masters, and passes that do not end well."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import transformers
from safetensors.torch import load_file

from plugins.verl_megatron_mindspeed.tests.engines import LAYOUTS, WHOLE, engine_of, new_driver
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import make_sequences, reference_gradient, weighted_loss
from verl_engine.testing.tiny_models import tiny_config

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput
    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist


def _norm(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[float, int | None]:
    step = new_driver(folder, rank, count_zeros=True, **settings).train(make_sequences(8)).optimizer
    return step.grad_norm, step.num_zeros


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_and_zeros_are_those_of_one_process(ranks: RankPool, model_folder: Path, layout: str) -> None:
    gradients = reference_gradient(model_folder, make_sequences(8)).values()
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    num_zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    for found, zeros in ranks.run(_norm, model_folder, LAYOUTS[layout]):
        assert math.isclose(found, norm, rel_tol=1e-5)
        assert zeros == num_zeros


def _write(folder: Path, config_class: Any, **settings: Any) -> Path:
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**tiny_config(33), **settings}))
    model.save_pretrained(folder)
    return folder


def test_rows_that_fill_up_the_vocabulary_are_no_zeros(ranks: RankPool, tmp_path: Path) -> None:
    # 33 tokens on two ranks: each matrix has a row more, whose gradient is zero.
    folder = _write(tmp_path, transformers.Qwen3Config)
    (_, whole), _ = ranks.run(_norm, folder, {})
    assert ranks.run(_norm, folder, {"tensor_parallel_size": 2})[1][1] == whole


EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def _weights_that_stay(rank: int, folder: Path) -> int:
    driver = new_driver(folder, rank)
    driver.train(make_sequences(4))
    weights = [weakref.ref(weight) for chunk in engine_of(driver).model.chunks for weight in chunk.parameters()]
    del driver
    gc.collect()
    return sum(weight() is not None for weight in weights)


def test_an_engine_that_is_gone_leaves_no_weights_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_weights_that_stay, _write(tmp_path, transformers.Qwen3MoeConfig, **EXPERTS)) == [0, 0]


def test_norm_counts_experts_of_all_ranks_once(ranks: RankPool, tmp_path: Path) -> None:
    folder = _write(tmp_path, transformers.Qwen3MoeConfig, **EXPERTS)
    right, _ = ranks.run(_norm, folder, {})[0]
    tensor = {"tensor_parallel_size": 2, "sequence_parallel": True}
    for settings in (
        {"expert_parallel_size": 2},
        {"expert_parallel_size": 2, **WHOLE},
        tensor,
        {"expert_parallel_size": 2, "expert_tensor_parallel_size": 1, **tensor},
    ):
        for found, _ in ranks.run(_norm, folder, settings):
            assert math.isclose(found, right, rel_tol=1e-5), settings


def _masters(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = engine_of(new_driver(folder, rank, param_dtype="bfloat16", **settings))
    found: dict[str, torch.Tensor] = {}
    for name, whole in engine.weights.tensor_shards(engine.training.held_master).items():
        for _, part in whole.shards:
            found[name] = torch.cat([found.get(name, torch.empty(0)), part.flatten()])
    return found


def test_masters_begin_with_what_the_folder_holds_not_with_what_it_is_rounded_to(
    ranks: RankPool, model_folder: Path
) -> None:
    held = load_file(model_folder / "model.safetensors")
    assert any((tensor != tensor.bfloat16()).any() for tensor in held.values())
    first, second = ranks.run(_masters, model_folder, {})
    for name, whole in held.items():
        parts = [part[name] for part in (first, second) if name in part]
        assert torch.equal(torch.cat(parts), whole.flatten()), name


def _decays(rank: int, folder: Path, settings: dict[str, Any]) -> set[tuple[bool, float]]:
    engine = engine_of(new_driver(folder, rank, weight_decay=0.1, **settings))
    return {
        (each.parameter.ndim > 1, group["weight_decay"])
        for each in engine.training.slices
        for group in each.inner.param_groups
        if any(each.held is held for held in group["params"])
    }


@pytest.mark.parametrize("settings", [{}, WHOLE, {"param_dtype": "bfloat16"}])
def test_only_matrices_decay(ranks: RankPool, model_folder: Path, settings: dict[str, Any]) -> None:
    assert ranks.run(_decays, model_folder, settings) == [{(True, 0.1), (False, 0.0)}] * 2


@dataclass(frozen=True)
class _Failing:
    """A loss that raises in the micro-batch of so many tokens."""

    num_tokens: int

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if batch.num_tokens == self.num_tokens:
            raise ZeroDivisionError
        return weighted_loss(output, batch)


def _abandon(rank: int, folder: Path, settings: dict[str, Any]) -> str:
    """Let the first pass fail, then a later one; return how the weights differ from those without the failures."""
    failing = new_driver(folder, rank, **settings)
    # Each rank's micro-batches have other lengths, the same on both.
    sequences = [sequence for sequence in make_sequences(4) for _ in range(2)]
    batches = failing.micro_batches(sequences)
    num_tokens = sum(len(sequence.token_ids) for sequence in batches[1])
    assert num_tokens != sum(len(sequence.token_ids) for sequence in batches[0])
    weights = []
    for is_failing in (True, False):
        driver = failing if is_failing else new_driver(folder, rank, **settings)
        for _ in range(2):
            if is_failing:
                with pytest.raises(ZeroDivisionError):
                    driver.step(batches, _Failing(num_tokens))
            driver.step(batches)
        weights.append(driver.weights())
    return differences(*weights)


@pytest.mark.parametrize("settings", [{}, {"overlap_grad_reduce": True, "overlap_param_gather": True}])
def test_a_pass_that_fails_leaves_nothing_behind(ranks: RankPool, model_folder: Path, settings: dict[str, Any]) -> None:
    # With overlap Megatron learns from the first pass how often each gradient comes.
    assert ranks.run(_abandon, model_folder, settings) == ["none"] * 2


def _marks(rank: int, folder: Path) -> list[bool]:
    """Nest contexts; return after each enter and leave whether Megatron may reduce."""
    training = engine_of(new_driver(folder, rank)).training
    group = training.chunks[0].bucket_groups[0]
    found = [group.is_last_microbatch]
    with training.gradients.sync(is_last_micro_batch=False):
        found.append(group.is_last_microbatch)
        with training.gradients.sync(is_last_micro_batch=False):
            found.append(group.is_last_microbatch)
        found.append(group.is_last_microbatch)
    with training.gradients.sync(is_last_micro_batch=True):
        found.append(group.is_last_microbatch)
    return found


def test_nested_contexts_hold_gradients_back_until_the_outermost_ends(ranks: RankPool, model_folder: Path) -> None:
    assert ranks.run(_marks, model_folder) == [[True, False, False, False, True]] * 2


def _overflow(rank: int, folder: Path) -> list[tuple[bool, float]]:
    engine = engine_of(driver := new_driver(folder, rank, param_dtype="float16"))
    scaler = engine.training.loss_scaler
    assert scaler is not None
    scaler.scale = 2.0**40
    found = []
    for _ in range(2):
        step = driver.train(make_sequences(8)).optimizer
        found.append((step.overflow and not step.applied, scaler.scale))
    return found


def test_an_overflow_of_float16_halves_the_scale_at_once(ranks: RankPool, model_folder: Path) -> None:
    assert ranks.run(_overflow, model_folder) == [[(True, 2.0**39), (True, 2.0**38)]] * 2
