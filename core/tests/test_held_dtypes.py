"""What transformers keeps in float32 in a narrow model, when weights are sent or exported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from core.tests.expert_models import DEEPSEEK, SIZES
from core.tests.test_module_engine import PlainEngine
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.engine.checkpoints.export import export_checkpoint
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.device import Device
from verl_engine.engine.weights.bucket import plan_buckets
from verl_engine.engine.weights.held_dtypes import held_dtypes

if TYPE_CHECKING:
    from pathlib import Path

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def write(folder: Path, model_type: str, **settings: Any) -> Path:
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.fault(3)
@pytest.mark.parametrize(
    ("model_type", "settings", "dtype", "kept"),
    [
        ("deepseek_v3", DEEPSEEK, torch.bfloat16, "e_score_correction_bias"),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2}, torch.bfloat16, "gate.weight"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}, torch.float16, "input_layernorm.weight"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}, torch.bfloat16, ""),
        ("qwen3", {"head_dim": 8}, torch.bfloat16, ""),
    ],
)
def test_they_are_those_of_a_model_loaded_so(
    tmp_path: Path, model_type: str, settings: dict[str, Any], dtype: torch.dtype, kept: str
) -> None:
    folder = write(tmp_path, model_type, **settings)
    loaded = load(folder, dtype).state_dict()
    expected = {name: tensor.dtype for name, tensor in loaded.items() if tensor.dtype != dtype}
    assert held_dtypes(load(folder, torch.float32), dtype) == expected
    assert any(name.endswith(kept) for name in expected) if kept else not expected
    assert held_dtypes(load(folder, torch.float32), torch.float32) == {}
    assert held_dtypes(torch.nn.Linear(2, 2), dtype) == {}


@pytest.mark.fault(3)
def test_they_are_sent_and_exported_as_they_are(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "deepseek_v3", **DEEPSEEK)
    model = load(folder, torch.float32)
    model.state_dict()[BIAS].copy_(6.9 + 0.1 * torch.rand(4))
    engine = PlainEngine(EngineConfig.model_validate({"backend": "plain"}), Device("cpu"), model)
    plan = plan_buckets(engine.weight_specs(), 1 << 20, torch.bfloat16, engine.held_dtypes(torch.bfloat16))
    dtypes = {entry.name: entry.dtype for bucket in plan for entry in bucket.entries}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {BIAS}
    store = CheckpointStore(tmp_path / "checkpoints", model_folder=folder)
    store.save(engine, 1, wait=True)
    (checkpoint,) = (tmp_path / "checkpoints").glob("*1")
    export_checkpoint(checkpoint, tmp_path / "exported", dtype="bfloat16")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported[BIAS], model.state_dict()[BIAS])
    assert exported["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
