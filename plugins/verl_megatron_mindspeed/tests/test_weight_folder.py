"""Reading parts of a Hugging Face folder's weights. Nothing here needs Megatron."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from verl_engine.contract.errors import ModelError
from verl_engine.engine.base import WeightSpec
from verl_engine.testing.tiny_models import tiny_config
from verl_megatron_mindspeed.weights.folder import WeightFolder, missing_weights, report

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {"a": torch.arange(12.0).view(4, 3), "b.c": torch.arange(5.0)}


def _specs(weights: dict[str, torch.Tensor]) -> dict[str, WeightSpec]:
    return {name: WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


@pytest.mark.parametrize("max_shard_size", [10**9, 1])
def test_rectangles_are_read_from_one_file_or_many(tmp_path: Path, max_shard_size: int) -> None:
    save_torch_state_dict(WEIGHTS, tmp_path, max_shard_size=max_shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if max_shard_size > 1 else 2)
    with WeightFolder(tmp_path) as folder:
        assert folder.names == WEIGHTS.keys()
        assert folder.shape("a") == (4, 3)
        assert torch.equal(folder.read("a", (1, 1), (2, 2)), WEIGHTS["a"][1:3, 1:3])
        assert torch.equal(folder.read("b.c", (3,), (2,)), WEIGHTS["b.c"][3:])
        assert folder.stored_name("d") is None


def test_experts_are_found_in_a_stack_as_transformers_keeps_them(tmp_path: Path) -> None:
    sizes = {**tiny_config(8), "moe_intermediate_size": 6, "num_experts": 3, "num_experts_per_tok": 1}
    config = transformers.Qwen3MoeConfig(**{**sizes, "num_hidden_layers": 1})
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    expected = load_file(tmp_path / "single" / "model.safetensors")
    experts = [name for name in expected if ".experts." in name]
    assert len(experts) == 9  # one by one: what transformers writes is what the hub's folders hold
    with WeightFolder(tmp_path / "stacked") as folder:
        assert not any(name in folder.names for name in experts)
        assert missing_weights(folder, _specs(expected), set()) == set()
        for name in experts:
            assert torch.equal(folder.read(name, (0, 0), folder.shape(name)), expected[name])
            assert torch.equal(folder.read(name, (1, 2), (3, 2)), expected[name][1:4, 2:4])


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .* other formats are not read"):
        WeightFolder(tmp_path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(ModelError, match="cannot be read"):
        WeightFolder(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", json.dumps({"weight_map": {"a": "gone.safetensors"}})])
def test_an_index_that_leads_nowhere_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="cannot be read"):
        WeightFolder(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with WeightFolder(tmp_path) as folder, pytest.raises(ModelError, match=r"a is stored as torch\.float8_e4m3fn"):
        folder.read("a", (0, 0), (2, 2))


def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with WeightFolder(tmp_path) as folder:
        assert missing_weights(folder, _specs(WEIGHTS), set()) == set()
        more = _specs({**WEIGHTS, "head": torch.zeros(1)})
        assert missing_weights(folder, more, {"head"}) == {"head"}
        with pytest.raises(ModelError, match=r"lacks head; it holds a, b\.c"):
            missing_weights(folder, more, set())
        with pytest.raises(ModelError, match=r"a has shape \(4, 3\) instead of \(3, 4\)"):
            missing_weights(folder, _specs({"a": torch.zeros(3, 4)}), set())


def test_what_the_model_does_not_have_is_reported_but_for_a_tied_output_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({**WEIGHTS, "lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    report(tmp_path, _specs(WEIGHTS), set(), "lm_head.weight")
    assert not caplog.records
    report(tmp_path, _specs({"a": WEIGHTS["a"]}), {"head"}, "lm_head.weight")
    first, second = (record.getMessage() for record in caplog.records)
    assert "lacks head: drawn anew" in first
    assert second.endswith("does not have: b.c")
