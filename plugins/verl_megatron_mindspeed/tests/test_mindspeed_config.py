"""MindSpeed's part of the ``engine`` section: what is decided elsewhere, and what does not go together, is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.mindspeed.repatch_keys import repatch_keys
from verl_megatron_mindspeed.mindspeed_config import DERIVED_KEYS, REFUSED_FEATURES


def new_config(mindspeed: dict[str, Any] | None = None, **changes: Any) -> MegatronConfig:
    section = {"backend": "megatron", "device": "npu", "mindspeed": mindspeed or {}, **changes}
    return validate(MegatronConfig, section, at="engine")


@pytest.mark.parametrize(
    ("mindspeed", "changes", "words"),
    [
        ({"flash_attention": True, "batch_invariant_attention": True}, {}, "both replace the same attention; set one"),
        ({"batch_invariant_attention": True}, {"context_parallel_size": 2}, "does not go with context_parallel_size=2"),
        ({"flash_attention": False}, {"context_parallel_size": 2}, "does not go with context_parallel_size=2"),
        ({"flash_attention": True}, {"transformer": "local"}, "no effect on transformer=local"),
        ({"features": {"use_flash_attn": True}}, {}, "decided by engine.mindspeed.flash_attention"),
        ({"features": {"tensor_model_parallel_size": 2}}, {}, "decided by engine.tensor_parallel_size"),
        ({"features": {"context_parallel_algo": "ulysses_cp_algo"}}, {}, "only it knows packed sequences"),
        ({"features": {"schedules_method": "dualpipev"}}, {}, "replaces Megatron's pipeline schedule"),
        ({}, {"transformer_options": {"use_flash_attn": True}}, "decided by engine.mindspeed.flash_attention"),
        ({"flash_attention": True}, {"device": "cuda"}, "mindspeed is for device=npu, and it is cuda"),
        ({"adaptor": "other"}, {}, r"engine\.mindspeed\.adaptor"),
    ],
)
def test_what_does_not_go_together_is_refused(mindspeed: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        new_config(mindspeed, **changes)


def test_flash_attention_is_on_unless_another_is_asked_for() -> None:
    assert new_config().mindspeed.uses_flash_attention
    assert not new_config({"batch_invariant_attention": True}).mindspeed.uses_flash_attention
    assert not new_config({"flash_attention": False}).mindspeed.uses_flash_attention


def test_every_argument_is_said_outright_and_none_twice() -> None:
    assert repatch_keys(new_config()).keys() == DERIVED_KEYS.keys()
    assert not DERIVED_KEYS.keys() & REFUSED_FEATURES.keys()


def test_arguments_follow_the_engine() -> None:
    config = new_config(
        {"features": {"moe_alltoall_overlap_comm": True}},
        param_dtype="bfloat16",
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        virtual_pipeline_parallel_size=2,
        context_parallel_size=2,
        expert_parallel_size=8,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        recompute="full",
        recompute_num_layers=3,
        transformer_options={"fp8": "e4m3", "moe_grouped_gemm": True},
    )
    expected = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "context_parallel_algo": "megatron_cp_algo",
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
        "variable_seq_lengths": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 3,
        "recompute_modules": None,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "fp16": False,
        "fp8": "e4m3",
        "fp8_format": "e4m3",
        "moe_grouped_gemm": True,
        "moe_alltoall_overlap_comm": True,
        "use_flash_attn": True,
        "transformer_impl": "transformer_engine",
    }
    keys = repatch_keys(config)
    assert {name: keys[name] for name in expected} == expected


def test_what_is_off_is_said_too() -> None:
    keys = repatch_keys(new_config(transformer="local"))
    assert keys["virtual_pipeline_model_parallel_size"] is None
    assert keys["recompute_granularity"] is None
    assert keys["recompute_method"] is None
    assert keys["context_parallel_size"] == 1
    assert keys["use_flash_attn"] is False
    assert keys["transformer_impl"] == "local"
