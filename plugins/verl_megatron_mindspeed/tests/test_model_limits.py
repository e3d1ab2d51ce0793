"""Models and settings that are refused, since Megatron would compute something else or nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from plugins.verl_megatron_mindspeed.tests.model_families import FAMILIES, LLAMA3, family_config
from verl_engine.contract.errors import ConfigError, ModelError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.hf_config import read_hf_config, read_rotary
from verl_megatron_mindspeed.model.limits import check_model
from verl_megatron_mindspeed.model.names import fused_name, global_name

if TYPE_CHECKING:
    from pathlib import Path


OTHER_MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3", {"attention_bias": True}, "attention_bias=true"),
    ("llama", {"mlp_bias": True}, "mlp_bias=true"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding windows"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding windows"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "some of its layers have experts"),
    ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=false"),
    ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 2.0}}, "Megatron has fixed"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='linear'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='yarn'"),
]
OTHER_LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"tensor_parallel_size": 3}, "does not divide the model's num_attention_heads=4; use one of 1, 2, 4"),
    ("qwen3", {"tensor_parallel_size": 4}, "does not divide the model's num_key_value_heads=2"),
    ("qwen3", {"pipeline_parallel_size": 4}, "does not divide the model's num_hidden_layers=2"),
    (
        "qwen3",
        {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
        "pipeline_parallel_size * virtual_pipeline_parallel_size=4 does not divide",
    ),
    (
        "qwen3",
        {"pipeline_parallel_size": 3, "transformer_options": {"num_layers_in_first_pipeline_stage": 1}},
        "leaves 1 of the model's num_hidden_layers=2 to 2 pipeline stages",
    ),
    ("qwen3", {"transformer_options": {"num_layers_in_last_pipeline_stage": 1}}, "pipeline_parallel_size of 2 or more"),
    (
        "qwen3",
        {
            "pipeline_parallel_size": 2,
            "virtual_pipeline_parallel_size": 2,
            "transformer_options": {"num_layers_in_first_pipeline_stage": 1},
        },
        "virtual_pipeline_parallel_size=2 does not divide the model's layers of each pipeline part=1",
    ),
    ("qwen3", {"expert_parallel_size": 2}, "expert_parallel_size=2 is for mixtures of experts"),
    (
        "qwen3",
        {"expert_tensor_parallel_size": 2, "tensor_parallel_size": 2},
        "expert_tensor_parallel_size=2 is for mixtures of experts",
    ),
    ("qwen3_moe", {"expert_parallel_size": 8}, "does not divide the model's num_experts=4"),
    (
        "qwen3_moe",
        {"expert_tensor_parallel_size": 3, "expert_parallel_size": 2},
        "does not divide the model's moe_intermediate_size=16",
    ),
    ("qwen3_moe", {"tensor_parallel_size": 2}, "needs engine.sequence_parallel=true"),
    ("qwen3", {"recompute": "full", "recompute_num_layers": 3}, "recompute_num_layers=3 does not divide"),
]


@pytest.mark.parametrize(("family", "changes", "message"), OTHER_MODELS, ids=[case[2] for case in OTHER_MODELS])
def test_a_model_that_megatron_would_compute_otherwise(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    family_config(family, **changes).save_pretrained(tmp_path)
    config = MegatronConfig()
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        check_model(config, read_hf_config(config, tmp_path), tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(("family", "fields", "message"), OTHER_LAYOUTS, ids=[case[2] for case in OTHER_LAYOUTS])
def test_a_model_that_cannot_be_divided_so(tmp_path: Path, family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_model(MegatronConfig(**fields), family_config(family), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_proven_families_pass(tmp_path: Path, family: str) -> None:
    check_model(MegatronConfig(), family_config(family), tmp_path)


def test_windows_that_no_layer_has_are_no_reason_to_refuse(tmp_path: Path) -> None:
    hf_config = family_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    check_model(MegatronConfig(), hf_config, tmp_path)


def test_another_model_type_is_refused_with_those_that_are_proven(tmp_path: Path) -> None:
    transformers.MistralConfig().save_pretrained(tmp_path)
    config = MegatronConfig()
    with pytest.raises(ModelError, match=r"type 'mistral', and .* llama, qwen2, qwen2_moe, qwen3, qwen3_moe only"):
        check_model(config, read_hf_config(config, tmp_path), tmp_path)


@pytest.mark.parametrize("content", [None, "", "{}", '{"model_type": "never-heard-of"}', "[1]"])
def test_a_folder_without_a_model_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        read_hf_config(MegatronConfig(), tmp_path)


def test_rotary_positions_are_found_where_transformers_4_has_them() -> None:
    class Old:
        rope_theta = 1e6
        rope_scaling = {"type": "linear", "factor": 2.0}  # noqa: RUF012 - as in a config of old

    found = read_rotary(Old())  # type: ignore[arg-type]
    assert (found.base, found.kind, found.settings) == (1e6, "linear", {"factor": 2.0})


def test_names_of_plain_layers_become_those_of_fused_ones() -> None:
    layer = "decoder.layers.3."
    fused = f"{layer}self_attention.linear_qkv.layer_norm_weight"
    assert fused_name(f"{layer}input_layernorm.weight", experts=False) == fused
    assert fused_name(fused, experts=True) == fused
    norm = f"{layer}pre_mlp_layernorm.weight"
    assert fused_name(norm, experts=False) == f"{layer}mlp.linear_fc1.layer_norm_weight"
    assert fused_name(norm, experts=True) == norm
    expert = f"{layer}mlp.experts.local_experts.7.linear_fc2.weight"
    assert fused_name(expert, experts=True) == f"{layer}mlp.experts.linear_fc2.weight7"


def test_layers_and_experts_are_counted_over_the_whole_model() -> None:
    expert = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"
    assert global_name(expert, [4, 6], 8) == "decoder.layers.6.mlp.experts.local_experts.10.linear_fc2.weight"
    grouped = "decoder.layers.0.mlp.experts.linear_fc1.weight2"
    assert global_name(grouped, [4, 6], 8) == "decoder.layers.4.mlp.experts.linear_fc1.weight10"
    assert global_name("output_layer.weight", [4, 6], 8) == "output_layer.weight"
