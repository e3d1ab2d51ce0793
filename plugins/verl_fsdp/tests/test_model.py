"""Which modules are sharded one by one, and what a model folder's loading says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from verl_engine.contract.errors import ConfigError, ModelError
from verl_engine.testing.tiny_models import tiny_config, write_absolute_position_model
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.model.block_settings import enable_recompute
from verl_fsdp.model.blocks import blocks, outermost
from verl_fsdp.model.loading import load_model

if TYPE_CHECKING:
    from pathlib import Path


def config(**settings: Any) -> Fsdp2Config:
    return Fsdp2Config(learning_rate=1e-3, device="cpu", **settings)


def qwen3(*, tied: bool = False) -> Any:
    with torch.device("meta"):
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**tiny_config(), tie_word_embeddings=tied))


def paths(model: Any, found: list[torch.nn.Module]) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in found]


LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    "named",
    [["Qwen3DecoderLayer"], {"Qwen3DecoderLayer", "Absent"}, "Qwen3DecoderLayer"],
    ids=["list", "set", "string"],
)
def test_by_default_the_layers_that_must_stay_whole_are_blocks(named: Any) -> None:
    model = qwen3()
    model._no_split_modules = named
    assert paths(model, blocks(model, config())) == LAYERS


@pytest.mark.parametrize("named", [None, [], ["Absent"]])
def test_a_model_that_names_no_block_is_divided_by_its_layers(named: Any) -> None:
    model = qwen3()
    model._no_split_modules = named
    assert paths(model, blocks(model, config())) == LAYERS
    model.config.num_hidden_layers = 3  # so nothing tells which modules are layers
    with pytest.raises(ModelError, match=r"name the classes of its layers in engine\.wrap: .*Qwen3DecoderLayer"):
        blocks(model, config())


def test_of_modules_one_inside_the_other_the_inner_comes_first() -> None:
    model = qwen3()
    found = blocks(model, config(wrap=("Qwen3DecoderLayer", "Qwen3MLP")))
    assert paths(model, found) == ["model.layers.0.mlp", "model.layers.0", "model.layers.1.mlp", "model.layers.1"]
    assert paths(model, outermost(found)) == LAYERS


def test_the_model_itself_is_never_a_block() -> None:
    model = qwen3()
    assert paths(model, blocks(model, config(wrap=("Qwen3ForCausalLM", "Qwen3Attention")))) == [
        f"{layer}.self_attn" for layer in LAYERS
    ]


def test_compiling_without_a_block_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^engine\.compile=true with engine\.wrap=\['Qwen3ForCausalLM'\]: .* leave wrap"
    ):
        blocks(qwen3(), config(wrap=("Qwen3ForCausalLM",), compile=True))
    assert blocks(qwen3(), config(wrap=("Qwen3ForCausalLM",))) == []


def test_an_unknown_class_in_wrap_is_answered_with_the_closest_that_the_model_has() -> None:
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has no module of class 'Qwen3DecoderLayr'; it has Qwen3D"):
        blocks(qwen3(), config(wrap=("Qwen3DecoderLayr",)))


def test_a_list_of_layers_in_wrap_is_refused() -> None:
    with pytest.raises(ConfigError, match="a ModuleList is never called"):
        blocks(qwen3(), config(wrap=("ModuleList",)))


@pytest.mark.parametrize("name", ["Embedding", "Linear"])
def test_a_module_in_wrap_that_is_tied_with_one_outside_is_refused(name: str) -> None:
    assert blocks(qwen3(), config(wrap=(name,)))
    with pytest.raises(ConfigError, match=rf"a {name}, shares a weight with a module outside of it"):
        blocks(qwen3(tied=True), config(wrap=(name,)))


def test_a_block_may_share_weights_inside_itself() -> None:
    model = qwen3()
    layer = model.model.layers[0]
    layer.post_attention_layernorm.weight = layer.input_layernorm.weight
    assert paths(model, blocks(model, config(wrap=("Qwen3DecoderLayer",)))) == LAYERS


def test_default_blocks_that_share_a_weight_are_left_to_what_holds_both() -> None:
    model = qwen3()
    layers = model.model.layers
    layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
    with pytest.raises(ModelError, match=r"engine\.wrap"):
        blocks(model, config())
    layers.append(type(layers[0])(model.config, 0))
    assert paths(model, blocks(model, config())) == ["model.layers.2"]


def test_a_layer_that_is_called_twice_is_one_block() -> None:
    model = qwen3()
    model.model.layers[1] = model.model.layers[0]
    assert paths(model, blocks(model, config())) == LAYERS[:1]


def test_checkpointing_is_refused_for_a_model_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "supports_gradient_checkpointing", False)
    model = load_model(config(), write_absolute_position_model(tmp_path / "gpt2"))
    with pytest.raises(ModelError, match=r"engine\.activation_checkpointing=true: GPT2LMHeadModel does not support it"):
        enable_recompute(model, config(activation_checkpointing=True))


def test_weights_that_a_folder_lacks_or_has_beyond_the_model_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_absolute_position_model(tmp_path / "gpt2")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.extra.weight"] = weights.pop("transformer.ln_f.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="verl_fsdp"):
        load_model(config(), folder)
    lacks, beyond = (record.getMessage() for record in caplog.records if record.name.startswith("verl_fsdp"))
    assert lacks.endswith("lacks transformer.ln_f.weight: drawn anew, by engine.seed")
    assert beyond.endswith("holds weights that GPT2LMHeadModel does not have: transformer.extra.weight")


def test_code_that_a_folder_brings_is_not_run(tmp_path: Path) -> None:
    folder = write_absolute_position_model(tmp_path / "own")
    (folder / "modeling_own.py").write_text("raise SystemExit('the folder ran its own code')\n")
    text = (folder / "config.json").read_text()
    mapped = '"auto_map": {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}, '
    (folder / "config.json").write_text(text.replace("{", "{" + mapped, 1).replace('"gpt2"', '"own"', 1))
    with pytest.raises(ModelError, match="does not hold"):
        load_model(config(), folder)
