"""A checkpoint as a Hugging Face folder, against what transformers itself saves and loads."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from core.tests.test_module_engine import PlainEngine, make
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError, WeightsError
from verl_engine.engine.checkpoints.export import export_checkpoint
from verl_engine.engine.checkpoints.folder_names import FolderNames
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.device import Device
from verl_engine.testing.tiny_models import tiny_config, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


def save(root: Path, model: torch.nn.Module, model_folder: Path | None = None, **settings: Any) -> Path:
    """Checkpoint a model after shifting its weights, which are its own then."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.linspace(0.0, 0.1, parameter.numel()).view_as(parameter) * (number + 1))
    config = EngineConfig.model_validate({"backend": "plain", **settings})
    store = CheckpointStore(root / "checkpoints", model_folder=model_folder)
    store.save(PlainEngine(config, Device("cpu"), model), 1, wait=True)
    return root / "checkpoints" / "step-00000001"


def require_same(found: Any, expected: Any) -> None:
    pairs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert pairs[0].keys() == pairs[1].keys()
    for name, tensor in pairs[1].items():
        assert torch.equal(pairs[0][name], tensor), name


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_an_export_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    checkpoint = save(tmp_path, model := load(folder, dtype=torch.float32), folder)
    done = export_checkpoint(checkpoint, tmp_path / "out")
    require_same(load(tmp_path / "out"), model)
    assert done.num_weights == len(list(model.parameters()))
    assert done.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_several_files_each_within_the_limit_and_another_dtype(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    checkpoint = save(tmp_path, model := load(folder, dtype=torch.float32), folder)
    told: list[tuple[int, int]] = []
    limit = 6000
    done = export_checkpoint(
        checkpoint,
        tmp_path / "out",
        dtype="bfloat16",
        shard_bytes=limit,
        on_shard=lambda *numbers: told.append(numbers),
    )
    assert len(done.files) > 5
    assert told == [(number, len(done.files)) for number in range(1, len(done.files) + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert sorted(set(index["weight_map"].values())) == sorted(done.files)
    assert index["metadata"]["total_size"] == done.num_bytes
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    require_same(load(tmp_path / "out"), model.to(torch.bfloat16))
    largest = max(parameter.nbytes for parameter in model.parameters())
    header = 2000
    sizes = [(tmp_path / "out" / name).stat().st_size for name in done.files]
    assert max(sizes) <= max(limit, largest) + header


def test_no_more_than_one_file_of_weights_is_in_memory(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    checkpoint = save(tmp_path, load(folder, dtype=torch.float32), folder)
    sizes: list[int] = []

    def measured(tensors: dict[str, torch.Tensor], *_: Any) -> None:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))

    with (
        mock.patch("safetensors.torch.save_file", measured),
        mock.patch("verl_engine.engine.checkpoints.export.sync"),
    ):
        export_checkpoint(checkpoint, tmp_path / "out", shard_bytes=10_000)
    assert len(sizes) > 5
    assert max(sizes) <= 10_000


def test_adapters_are_merged_in_and_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = write_tiny_model(tmp_path / "model")
    model = load(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    checkpoint = save(tmp_path, model, folder, lora={"rank": 4, "alpha": 12.0})
    export_checkpoint(checkpoint, tmp_path / "out")
    found = load(tmp_path / "out")
    assert found.state_dict().keys() == load(folder).state_dict().keys()
    layer = model.model.layers[1].mlp.down_proj
    by_hand = layer.base_layer.weight + 3.0 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    torch.testing.assert_close(found.model.layers[1].mlp.down_proj.weight, by_hand)
    assert torch.equal(found.model.layers[0].self_attn.k_proj.weight, model.model.layers[0].self_attn.k_proj.weight)
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(found(ids).logits, model(ids).logits)


def test_an_adapter_without_its_scale_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = write_tiny_model(tmp_path / "model")
    model = load(folder, dtype=torch.float32)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj"]), model)
    with pytest.raises(WeightsError, match=r"adapter of model.layers.0.self_attn.q_proj cannot be merged"):
        export_checkpoint(save(tmp_path, model, folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_critic_is_exported_as_a_model_with_one_label(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    model = AutoModelForTokenClassification.from_pretrained(
        folder, num_labels=1, local_files_only=True, dtype=torch.float32
    )
    export_checkpoint(save(tmp_path, model, folder, head="value"), tmp_path / "out")
    found = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", local_files_only=True)
    require_same(found, model)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForTokenClassification"]


def test_a_checkpoint_without_a_model_folder_needs_one_to_be_given(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    checkpoint = save(tmp_path, model := load(folder, dtype=torch.float32))
    with pytest.raises(ConfigError, match=r"holds no config.json; give the model folder .*--model MODEL_FOLDER"):
        export_checkpoint(checkpoint, tmp_path / "out")
    export_checkpoint(checkpoint, tmp_path / "out", model_folder=folder)
    require_same(load(tmp_path / "out"), model)


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(tmp_path, tmp_path)

    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(tmp_path, tmp_path / "link")


@pytest.mark.parametrize("failure", [OSError("full"), SafetensorError("full"), KeyboardInterrupt("full")])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    folder = write_tiny_model(tmp_path / "model")
    checkpoint = save(tmp_path, load(folder, dtype=torch.float32), folder)
    with (
        mock.patch("safetensors.torch.save_file", side_effect=failure),
        pytest.raises((WeightsError, KeyboardInterrupt), match="full"),
    ):
        export_checkpoint(checkpoint, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_output_that_cannot_be_made_and_a_config_that_is_none_are_errors_of_the_tree(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    checkpoint = save(tmp_path, load(folder, dtype=torch.float32), folder)
    with pytest.raises(WeightsError, match=r"out failed, nothing is there: .*Not a directory"):
        export_checkpoint(checkpoint, folder / "config.json" / "out")
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"config.json holds no JSON object"):
            export_checkpoint(checkpoint, tmp_path / "out", model_folder=folder)
    assert not (tmp_path / "out").exists()


def test_experts_are_exported_one_by_one_as_save_pretrained_writes_them(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**tiny_config(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    checkpoint = save(tmp_path, model := load(tmp_path / "model", dtype=torch.float32), tmp_path / "model")
    model.save_pretrained(tmp_path / "expected")
    done = export_checkpoint(checkpoint, tmp_path / "out", shard_bytes=10_000)
    found = {name: tensor for file in done.files for name, tensor in load_file(tmp_path / "out" / file).items()}
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in expected
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert done.num_weights == len(expected)
    require_same(load(tmp_path / "out"), model)


def test_without_transformers_weights_keep_the_names_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    checkpoint = save(tmp_path, model := load(folder, dtype=torch.float32), folder)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        export_checkpoint(checkpoint, tmp_path / "out")
    assert "transformers cannot say how a folder of this model names its weights" in caplog.text
    require_same(load(tmp_path / "out"), model)


def test_weights_that_a_folder_joins_are_written_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def joined(_: object, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"qkv" if name in "qkv" else name: tensor for name, tensor in weights.items()}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", joined)
    names = FolderNames(write_tiny_model(tmp_path / "model"), "language_model")
    assert names.together(dict.fromkeys("qakvb", (2,))) == [["q", "k", "v"], ["a"], ["b"]]


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "root", model_folder=write_tiny_model(tmp_path / "model"))
    store.save(make(), 1, wait=True)
    for name in ("int8", "bf16", "nn", "float8_e4m3fn"):
        with pytest.raises(ConfigError, match=f"--dtype {name} cannot be exported; use float32, bfloat16 or float16"):
            export_checkpoint(tmp_path / "root" / "step-00000001", tmp_path / "out", dtype=name)
