"""Weights that transformers keeps in float32 are float32 in the forward of an engine in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from core.tests.expert_models import SIZES
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import make_sequences, masked_log_probs

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    "olmo_hybrid": {**LINEAR, "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
WRAPPED = "_fsdp_wrapped_module."
KEPT = {"ernie4_5_moe": ("layers.1.mlp.gate", "weight"), "olmo_hybrid": ("layers.0.linear_attn", "A_log")}


def in_forward(rank: int, folder: Path, backend: str, path: str, name: str) -> tuple[Any, ...]:
    """Return log-probs, the dtypes of a kept weight in forwards, and those of exported weights."""
    section = {"backend": backend, "device": "cpu", "param_dtype": "bfloat16", "packing": False}
    driver = Driver(section, folder, rank, 2)
    model: Any = driver.engine
    seen: list[torch.dtype] = []
    module = next(each for own, each in model.module.named_modules() if own.replace(WRAPPED, "").endswith(path))
    module = getattr(module, "_fsdp_wrapped_module", module)
    module.register_forward_pre_hook(lambda own, _: seen.append(getattr(own, name).dtype))
    found = driver.infer(make_sequences(4))
    driver.train(make_sequences(4))
    return found, set(seen), {str(entry.dtype) for entry in driver.engine.weight_specs()}


@pytest.mark.fault(3)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
def test_kept_weights_are_float32_where_others_are_narrow(
    ranks: RankPool, tmp_path: Path, kind: str, backend: str
) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    truth = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = [masked_log_probs(truth, sequence) for sequence in make_sequences(4)]
    for found, dtypes, exported in ranks.run(in_forward, tmp_path, backend, *KEPT[kind]):
        assert dtypes == {torch.float32}
        assert exported == {"torch.float32"}
        assert all(torch.allclose(own, right.float(), atol=0.05) for own, right in zip(found, expected, strict=True))
