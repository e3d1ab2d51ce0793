"""Sequences that the library's patches split over two ranks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

from plugins.verl_fsdp_turbo.tests.conftest import REAL
from plugins.verl_fsdp_turbo.tests.on_ranks import build, build_another, refusal
from verl_engine.batch.packed import SegmentRun
from verl_engine.contract.errors import ModelError
from verl_engine.testing.conformance import EngineConformance
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs
from verl_engine.testing.tiny_models import tiny_config
from verl_fsdp_turbo.ulysses import block_mask, require_splittable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

MODELING: Final = "transformers.models.qwen3.modeling_qwen3"
PATCHES: Final = [{"target_functions": [f"{MODELING}.eager_attention_forward"], "type": "full_attention"}]
BY_ENGINE: Final[dict[str, Any]] = {
    "ulysses_parallel_size": 2,
    "cp_plan": {"ulysses_function_patches": PATCHES},
}
BY_ENGINE_IN_ROWS: Final[dict[str, Any]] = BY_ENGINE | {"packing": False}
BY_MODEL: Final[dict[str, Any]] = {
    "ulysses_parallel_size": 2,
    "packing": False,
    "cp_plan": {"ulysses_function_patches": PATCHES, "tokens_split_by": "model"},
    "module_patches": [
        {
            "target": f"{MODELING}.Qwen3Model.forward",
            "replacement": "fsdp_turbo.models.qwen3.qwen3_model_forward",
        }
    ],
}


def has_function_patches(_rank: int) -> bool:
    from fsdp_turbo.fsdp_turbo_config import CPPlanConfig

    return "ulysses_function_patches" in {field.name for field in dataclasses.fields(CPPlanConfig)}


@pytest.fixture
def patching(ranks: RankPool) -> Iterator[RankPool]:
    """Two processes, where the library can replace functions; older releases cannot. They end: it keeps its groups."""
    if not all(ranks.run(has_function_patches)):
        pytest.skip("this release of the library has no ulysses_function_patches")
    yield ranks
    ranks.close()


def as_without(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Compare engines of one process with fsdp2's: an actor, its reference, and models whose sequences nobody splits.

    Returns:
        How far log-probs and a step's weights are off, and the data-parallel size.
    """
    settings = settings | {"learning_rate": 1e-2, "eps": 1e-3}
    plain = Driver({"backend": "fsdp2", "device": "cpu", "learning_rate": 1e-2, "eps": 1e-3}, folder, rank, 2)
    sequences = make_sequences(5)
    expected = plain.infer(sequences)
    plain.train(make_sequences(6))
    trained = plain.weights()
    actor = build(rank, folder, **settings)
    found = {"log-probs": _furthest(actor.infer(sequences), expected)}
    reference = build_another(rank, folder, **settings, forward_only=True)
    unsplit = {name: value for name, value in settings.items() if name in ("learning_rate", "eps", "packing")}
    whole = build_another(rank, folder, **unsplit)
    found["log-probs of the reference"] = _furthest(reference.infer(sequences), expected)
    found["log-probs of a model that nobody splits"] = _furthest(whole.infer(sequences), expected)
    eager = load_reference(folder)
    found["log-probs of transformers"] = _furthest([masked_log_probs(eager, each) for each in sequences], expected)
    for driver in (actor, whole):
        driver.train(make_sequences(6))
    for whose, driver in (("the actor", actor), ("a model that nobody splits", whole)):
        weights = driver.weights()
        found[f"a step of {whose}"] = max(float((weights[name] - each).abs().max()) for name, each in trained.items())
    found["log-probs of the reference after a step"] = _furthest(reference.infer(sequences), expected)
    return found, actor.data_parallel_size


def _furthest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((own - other).abs().max()) for own, other in zip(found, expected, strict=True))


@pytest.mark.thinned(one_in=3)
@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [
        BY_ENGINE,
        BY_ENGINE_IN_ROWS,
        pytest.param(BY_MODEL, marks=pytest.mark.skipif(bool(REAL), reason="the real library has no such Qwen3")),
    ],
    ids=["tokens split by engine", "rows split by engine", "rows split by model"],
)
def test_actor_reference_and_others_of_one_process_compute_what_they_compute_alone(
    model_folder: Path, patching: RankPool, settings: dict[str, Any]
) -> None:
    for found, data_parallel_size in patching.run(as_without, model_folder, settings):
        assert {name: off for name, off in found.items() if not off < 1e-5} == {}
        assert data_parallel_size == 1


@pytest.mark.dist
@pytest.mark.usefixtures("patching")
class TestSeveralEnginesThatSplitSequences(EngineConformance):
    backend = "fsdp_turbo"
    settings: ClassVar[Mapping[str, Any]] = BY_ENGINE | {"memory": {"recompute": True}}
    only: ClassVar[tuple[str, ...]] = ("several_engines/in_turns",)


@pytest.mark.nightly
class TestSeveralEnginesThatSplitSequencesInAll(TestSeveralEnginesThatSplitSequences):
    only: ClassVar[tuple[str, ...]] = ("several_engines",)


def without_a_patch(rank: int, folder: Path) -> str:
    import transformers.models.qwen3.modeling_qwen3 as modeling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling.Qwen3Model, "forward", _whole)
        driver = build(rank, folder, **{**BY_MODEL, "module_patches": []})
        return refusal(lambda: driver.infer(make_sequences(2)))


def _whole(self: Any, *, input_ids: torch.Tensor, **_: Any) -> Any:
    return BaseModelOutputWithPast(last_hidden_state=self.embed_tokens(input_ids))


@pytest.mark.usefixtures("only_fake")
@pytest.mark.dist
def test_a_model_that_does_not_split_tokens_is_found_out(model_folder: Path, patching: RankPool) -> None:
    for message in patching.run(without_a_patch, model_folder):
        assert "its forward does not split sequences over ranks as it was said to" in message


QWEN3_5: Final = "transformers.models.qwen3_5.modeling_qwen3_5"
AS_RECIPES: Final[dict[str, Any]] = {
    "ulysses_parallel_size": 2,
    "packing": False,
    "cp_plan": {
        "ulysses_function_patches": [
            {"target_functions": [f"{QWEN3_5}.eager_attention_forward"], "type": "full_attention"},
            {"target_functions": [f"{QWEN3_5}.Qwen3_5GatedDeltaNet.forward"], "type": "gated_delta_net"},
        ]
    },
}


def write_recurrent_model(folder: Path) -> Path:
    """Write a Qwen3.5 of one layer with a recurrent state, and one of attention."""
    config = transformers.Qwen3_5TextConfig(
        **tiny_config(),
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def recurrent_as_without(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[float, float, str]:
    """Compare a step of a model with a recurrent state with fsdp2's, and try to pack it."""
    optimizer: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-3}
    plain = Driver({"backend": "fsdp2", "device": "cpu", "packing": False} | optimizer, folder, rank, 2)
    sequences = make_sequences(5)
    expected = plain.infer(sequences)
    plain.train(make_sequences(6))
    trained = plain.weights()
    split = build(rank, folder, **settings, **optimizer)
    log_probs = _furthest(split.infer(sequences), expected)
    split.train(make_sequences(6))
    weights = split.weights()
    step = max(float((weights[name] - weight).abs().max()) for name, weight in trained.items())
    return log_probs, step, refusal(lambda: build_another(rank, folder, **settings | {"packing": True}))


@pytest.mark.dist
def test_rows_of_a_model_with_a_recurrent_state_are_split_as_in_the_recipes(tmp_path: Path, patching: RankPool) -> None:
    folder = write_recurrent_model(tmp_path / "qwen3_5")
    for log_probs, step, packed in patching.run(recurrent_as_without, folder, AS_RECIPES):
        assert log_probs < 1e-5
        assert step < 1e-5
        assert "sequences would run into each other" in packed


@pytest.mark.parametrize("heads", ["num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"])
def test_ranks_must_divide_the_heads(heads: str) -> None:
    sizes: dict[str, Any] = {heads: 3}
    model: Any = SimpleNamespace(config=transformers.Qwen3_5TextConfig(**sizes))
    with pytest.raises(ModelError, match=r"engine\.ulysses_parallel_size=2 does not divide the 3 .*heads of"):
        require_splittable(model, 2)


@pytest.mark.parametrize(
    "config",
    [transformers.MistralConfig(sliding_window=8), transformers.Gemma2Config(sliding_window=8)],
    ids=["in all layers", "in some layers"],
)
def test_a_sliding_window_is_refused_since_the_mask_has_none(config: Any) -> None:
    with pytest.raises(ModelError, match=r"a part of the sequence only \(sliding_attention\)"):
        require_splittable(cast("Any", SimpleNamespace(config=config)), 2)


def test_a_token_sees_those_of_its_own_sequence_up_to_itself() -> None:
    mask = block_mask((SegmentRun(0, 2, 2), SegmentRun(4, 1, 1)), torch.device("cpu"), torch.float32)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
