"""Dense models: as fsdp2 and as one process; norms, held gradients, and what stays on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from plugins.verl_fsdp_turbo.tests.on_ranks import build, build_another, forget_division, refusal
from verl_engine.engine.fully_sharded import fsdp_modules
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.reference import (
    accumulate,
    load_reference,
    make_sequences,
    reference_gradient,
    relative_error,
)
from verl_engine.testing.tiny_models import write_tiny_model
from verl_fsdp_turbo.library import Library
from verl_fsdp_turbo.library_config import library_config

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_fsdp.engine import ShardedEngine
    from verl_fsdp_turbo.config import FsdpTurboConfig

TOLERANCE: Final = 1e-5  # what two ways to add the same numbers in float32 may differ by
# A larger eps than AdamW's own: a gradient of 0 but for rounding would else move its weight by a whole step.
PLAIN: Final[dict[str, Any]] = {"learning_rate": 1e-2, "max_grad_norm": 0.1, "eps": 1e-4}
ROW_BY_ROW: Final[dict[str, Any]] = {"chunk_mbs": 1, "chunk_arg_indexs": [0], "chunk_kwarg_names": ["attention_mask"]}

Run = tuple[list[float], list[float], dict[str, torch.Tensor]]


def three_steps(driver: Driver) -> Run:
    """Return losses, norms and final weights."""
    reports = [driver.train(make_sequences(6, seed=step)) for step in range(3)]
    return [report.loss for report in reports], [report.optimizer.grad_norm for report in reports], driver.weights()


def train_both(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[Run, Run]:
    """Train by the library, and by fsdp2."""
    turbo = build(rank, folder, **PLAIN, **settings)
    return three_steps(turbo), three_steps(Driver({"backend": "fsdp2", "device": "cpu"} | PLAIN, folder, rank, 2))


def train_alone(folder: Path) -> Run:
    """Train in this process, by transformers and torch alone."""
    model = load_reference(folder)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    losses, norms = [], []
    for step in range(3):
        losses.append(accumulate(model, make_sequences(6, seed=step))[0])
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.thinned(one_in=2)
@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fully_shard_parallel_size": 1},
        {"offload_policy": True},
        {"sequence_parallel_size": 2},
        {"fsdp_plan": {"apply_modules": {"model.layers.{*}": {"reshard_after_forward": False}, "lm_head": {}}}},
        {"fsdp_plan": {"num_to_forward_prefetch": 1, "num_to_backward_prefetch": 1}, "memory": {"recompute": True}},
        {"packing": False, "memory": {"chunk_batch": {**ROW_BY_ROW, "apply_modules": ["model.layers.{*}"]}}},
    ],
    ids=["sharded", "copies", "offloaded", "sequence parallel", "by plan", "prefetched and recomputed", "row by row"],
)
def test_three_steps_are_those_of_fsdp2_and_of_one_process(
    model_folder: Path, ranks: RankPool, settings: dict[str, Any]
) -> None:
    alone = train_alone(model_folder)
    for turbo, fsdp2 in ranks.run(train_both, model_folder, settings):
        for losses, norms, weights in (fsdp2, alone):
            assert turbo[0] == pytest.approx(losses, rel=TOLERANCE)
            assert turbo[1] == pytest.approx(norms, rel=TOLERANCE)
            for name, weight in turbo[2].items():
                torch.testing.assert_close(weight, weights[name], rtol=0, atol=TOLERANCE)


def who_clips(rank: int, folder: Path, settings: dict[str, Any]) -> int:
    calls: list[float] = importlib.import_module("fsdp_turbo.training.clip_grads").calls
    calls.clear()
    build(rank, folder, **settings).train(make_sequences(4))
    return len(calls)


@pytest.mark.usefixtures("only_fake")
@pytest.mark.dist
@pytest.mark.parametrize(("settings", "count"), [({}, 1), ({"fully_shard_parallel_size": 1}, 0)])
def test_the_library_clips_only_where_its_norm_is_that_of_the_whole_gradient(
    model_folder: Path, ranks: RankPool, settings: dict[str, Any], count: int
) -> None:
    assert ranks.run(who_clips, model_folder, settings) == [count, count]


def poisoned(rank: int, folder: Path, value: float) -> tuple[bool, str, bool, bool]:
    """Put a number into one rank's gradient; say whether that step and the next were made, and what changed."""
    driver = build(rank, folder)
    engine: Any = driver.engine
    before, clip = driver.weights(), engine.clip_gradients

    def poison() -> torch.Tensor:
        if rank == 1:
            next(iter(engine.parameters.values())).grad.to_local().view(-1)[0] = value
        norm: torch.Tensor = clip()
        return norm

    engine.clip_gradients = poison
    skipped = driver.train(make_sequences(4)).optimizer
    changed = differences(driver.weights(), before)
    engine.clip_gradients = clip
    applied = driver.train(make_sequences(4)).optimizer.applied
    is_finite = all(bool(weight.isfinite().all()) for weight in driver.weights().values())
    return skipped.applied, changed, applied, is_finite


@pytest.mark.dist
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_every_rank_skips_a_step_whose_gradients_the_library_s_clipping_has_spoilt(
    model_folder: Path, ranks: RankPool, value: float
) -> None:
    assert ranks.run(poisoned, model_folder, value) == [(False, "none", True, True)] * 2


def without_world_size(rank: int, folder: Path) -> tuple[float, float, bool]:
    """Return a step's norm with WORLD_SIZE set and not, and whether the library gets its own classes to the bottom."""
    norms = [build(rank, folder).train(make_sequences(4)).optimizer.grad_norm]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE")
        driver = build(rank, folder)
        norms.append(driver.train(make_sequences(4)).optimizer.grad_norm)
        engine = cast("ShardedEngine", driver.engine)
        values = library_config(cast("FsdpTurboConfig", engine.config), 2, "cpu")
        told = Library().build_config(values)
    parts = (told, told.distributed, told.distributed.fsdp_plan, told.memory)
    return norms[0], norms[1], all(map(dataclasses.is_dataclass, parts))


@pytest.mark.dist
def test_gradients_are_averaged_without_world_size_too(model_folder: Path, ranks: RankPool) -> None:
    for norm, norm_without, has_classes in ranks.run(without_world_size, model_folder):
        assert norm_without == pytest.approx(norm, rel=TOLERANCE)
        assert has_classes, "a mapping would be taken as it is, and its defaults left out"


def in_parts(rank: int, folder: Path) -> str:
    plan = ROW_BY_ROW | {"apply_modules": ["model"]}
    return refusal(lambda: build(rank, folder, packing=False, memory={"chunk_batch": plan}))


@pytest.mark.dist
def test_sharded_modules_are_not_run_in_parts_that_other_ranks_may_have_fewer_of(
    model_folder: Path, ranks: RankPool
) -> None:
    for message in ranks.run(in_parts, model_folder):
        assert "model.layers.0 in it talks to other ranks each time" in message


def held_bytes(rank: int, folder: Path, gradient_sync: str) -> tuple[int, int, int, dict[str, torch.Tensor]]:
    """Return bytes of gradients after the first of two micro-batches, both numbers of the formula, and the gradient."""
    driver = build(rank, folder, gradient_sync=gradient_sync)
    engine = cast("ShardedEngine", driver.engine)
    found: list[int] = []
    plain = engine.gradient_sync

    def look(is_last_micro_batch: bool) -> Any:
        if is_last_micro_batch:
            gradients = [grad for slot in engine.gradient_slots() if (grad := slot.get()) is not None]
            local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
            found.append(sum(tensor.nbytes for tensor in local))
        return plain(is_last_micro_batch=is_last_micro_batch)

    gradients: dict[str, torch.Tensor] = {}
    clip = engine.clip_gradients

    def keep() -> torch.Tensor:
        for name, parameter in engine.parameters.items():
            gradients[name] = cast("DTensor", parameter.grad).full_tensor().clone()
        return clip()

    engine.gradient_sync = look  # type: ignore[method-assign]
    engine.clip_gradients = keep  # type: ignore[method-assign]
    driver.train(make_sequences(8))
    return found[0], engine.sync.last_bytes, engine.sync.every_bytes, gradients


@pytest.mark.dist
def test_holding_gradients_back_changes_none_of_them_and_takes_the_bytes_of_the_formula(
    model_folder: Path, ranks: RankPool
) -> None:
    last = ranks.run(held_bytes, model_folder, "last_micro_batch")
    every = ranks.run(held_bytes, model_folder, "every_micro_batch")
    expected = reference_gradient(model_folder, make_sequences(8))
    for (held, last_bytes, every_bytes, gradient), (held_each, *_, gradient_each) in zip(last, every, strict=True):
        assert held == last_bytes, "four bytes per trained parameter"
        assert held_each == every_bytes == last_bytes // 2, "the same over two ranks"
        assert relative_error(gradient, gradient_each) < TOLERANCE
        assert relative_error(gradient, expected) < 1e-5


def chosen_sync(rank: int, folder: Path) -> list[str]:
    budgets = (10**9, 1)
    return [
        cast("ShardedEngine", build(rank, folder, gradient_sync="auto", held_gradient_bytes=budget).engine).sync.mode
        for budget in budgets
    ]


@pytest.mark.dist
def test_auto_takes_what_fits(model_folder: Path, ranks: RankPool) -> None:
    assert ranks.run(chosen_sync, model_folder) == [["last_micro_batch", "every_micro_batch"]] * 2


def offloaded(rank: int, folder: Path) -> list[bool]:
    cases: tuple[dict[str, Any], ...] = ({"offload_policy": True}, {"forward_only": True}, {})
    found = []
    for settings in cases:
        model: Any = cast("ShardedEngine", build(rank, folder, **settings).engine).model
        groups: list[Any] = [module._get_fsdp_state()._fsdp_param_group for module in fsdp_modules(model)]
        found.append(all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups))
    return found


@pytest.mark.dist
def test_weights_stay_on_the_cpu_with_offload_policy_and_with_forward_only(model_folder: Path, ranks: RankPool) -> None:
    assert ranks.run(offloaded, model_folder) == [[True, True, False]] * 2


def sharded_apart(rank: int, folder: Path, patterns: list[str]) -> str:
    plan: dict[str, Any] = {"apply_modules": {pattern: {} for pattern in patterns}}
    return refusal(lambda: build(rank, folder, fsdp_plan=plan))


@pytest.mark.dist
def test_tied_embeddings_go_with_the_rest_of_the_model(tmp_path: Path, ranks: RankPool) -> None:
    folder = write_tiny_model(tmp_path / "tied", tied=True)
    both = ["model.layers.{*}", "model.embed_tokens", "lm_head"]
    for message in ranks.run(sharded_apart, folder, both):
        assert message.startswith("ConfigError: engine.fsdp_plan.apply_modules: lm_head, model.embed_tokens shares")
    assert ranks.run(sharded_apart, folder, both[:1]) == ["", ""]


@pytest.mark.dist
def test_a_misspelt_pattern_beside_others_is_refused(model_folder: Path, ranks: RankPool) -> None:
    for message in ranks.run(sharded_apart, model_folder, ["model.layers.{*}", "lm_hed"]):
        assert "'lm_hed' fits no module of the model; close to it are lm_head" in message


def divided_by_others(rank: int, folder: Path) -> str:
    """Build an engine after somebody looked."""
    forget_division()
    importlib.import_module("fsdp_turbo.distributed.parallel_state").get_parallel_state()
    return refusal(lambda: build_another(rank, folder))


@pytest.mark.usefixtures("only_fake")
@pytest.mark.dist
def test_a_division_that_somebody_else_made_is_refused(model_folder: Path, ranks: RankPool) -> None:
    for message in ranks.run(divided_by_others, model_folder):
        assert message.startswith("PluginError: fsdp_turbo's division of the ranks was made by somebody else")


def replaced_by(*names: str) -> list[dict[str, str]]:
    return [{"target": "transformers.models.qwen3.modeling_qwen3.rotate_half", "replacement": name} for name in names]


def with_replacements(rank: int, folder: Path) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], bool]:
    """Use engines by turns that have a function replaced in different ways; then make each change by hand, alone."""
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    plain, sequences = modeling.rotate_half, make_sequences(3)
    drivers = [build(rank, folder, module_patches=replaced_by("torch.abs"))]
    drivers += [build_another(rank, folder, module_patches=replaced_by(*names)) for names in (["torch.neg"], [])]
    found = [driver.infer(sequences) for driver in (*drivers, *drivers)]
    is_back = modeling.rotate_half is plain
    expected = []
    for function in (torch.abs, torch.neg, plain):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling, "rotate_half", function)
            expected.append(build(rank, folder).infer(sequences))
    return found, expected, is_back


def misnamed(rank: int, folder: Path) -> str:
    patch = {"target": "transformers.models.qwen3.modeling_qwen3.rotate_halve", "replacement": "torch.neg"}
    return refusal(lambda: build(rank, folder, module_patches=[patch]))


@pytest.mark.dist
def test_a_patch_of_nothing_is_refused(model_folder: Path, ranks: RankPool) -> None:
    for message in ranks.run(misnamed, model_folder):
        assert "there is no rotate_halve in transformers.models.qwen3.modeling_qwen3" in message


def patch_methods(rank: int, folder: Path) -> tuple[int, bool, str]:
    """Replace a method of the norms; count those of the model that have another one, and look at the class."""
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    home, plain = modeling.__name__, modeling.Qwen3RMSNorm.extra_repr
    patch = {"target": f"{home}.Qwen3RMSNorm.extra_repr", "replacement": f"{home}.repeat_kv"}
    model = cast("Any", build(rank, folder, module_patches=[patch]).engine).model
    count = sum("extra_repr" in vars(module) for module in model.modules())
    lacking = {"target": "torch.nn.Conv1d.extra_repr", "replacement": f"{home}.repeat_kv"}
    return (
        count,
        modeling.Qwen3RMSNorm.extra_repr is plain,
        refusal(lambda: build(rank, folder, module_patches=[lacking])),
    )


@pytest.mark.fault(35)
@pytest.mark.dist
def test_a_method_is_replaced_in_each_module_of_its_class_and_some_must_be_there(
    model_folder: Path, ranks: RankPool
) -> None:
    for count, is_class_plain, message in ranks.run(patch_methods, model_folder):
        assert count == 2 * 4 + 1, "two norms a layer, two of its queries and keys, and the last"
        assert is_class_plain
        assert "did not match the model: target='torch.nn.Conv1d.extra_repr'" in message


@pytest.mark.dist
def test_each_engine_of_a_process_has_its_own_functions_replaced(model_folder: Path, ranks: RankPool) -> None:
    for found, expected, is_back in ranks.run(with_replacements, model_folder):
        torch.testing.assert_close(found, expected * 2, rtol=0, atol=TOLERANCE)
        assert all((one[0] - other[0]).abs().max() > 1e-3 for one, other in pairwise((*expected, expected[0])))
        assert is_back
