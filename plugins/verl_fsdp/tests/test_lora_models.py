"""Adapters on models of many kinds: on the layers asked for and no others, and saved as the plain model."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers

from core.tests.expert_models import DEEPSEEK, GROUPED_EXPERTS, SIZES
from verl_engine.contract.engine_config import LoraConfig
from verl_engine.contract.errors import ModelError
from verl_engine.engine.train_mode import set_train_mode
from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_engine.engine.weights.model_folder import ModelFolderWriter
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.model.loading import load_model
from verl_fsdp.model.lora import inject_adapters, low_rank_exports, save_adapter

if TYPE_CHECKING:
    from pathlib import Path

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"{name}_proj" for name in ("gate", "up", "down")}
LATENT_ATTENTION = {
    f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
}
SHARED = {*(f"mlp.{name}" for name in MLP), *(f"mlp.shared_experts.{name}" for name in MLP)}
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "glm4_moe": ({**GROUPED_EXPERTS, "head_dim": 8}, ATTENTION | SHARED),
    "qwen2_moe": (
        {"num_experts": 4, "shared_expert_intermediate_size": 16},
        ATTENTION | {f"mlp.shared_expert.{name}" for name in MLP} | {"mlp.shared_expert_gate"},
    ),
    "mixtral": ({"num_local_experts": 4}, ATTENTION),
    "qwen3_moe": ({"num_experts": 4, "head_dim": 8}, ATTENTION),
    "deepseek_v2": (DEEPSEEK, LATENT_ATTENTION | SHARED),
    "deepseek_v3": (DEEPSEEK, LATENT_ATTENTION | SHARED),
    "llama4_text": (
        {"num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 8},
        ATTENTION | {f"feed_forward.shared_expert.{name}" for name in MLP},
    ),
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 8}, ATTENTION),
    "granitemoe": ({"num_local_experts": 4}, ATTENTION),
    "olmoe": ({"num_experts": 4}, ATTENTION),
    "phimoe": ({"num_local_experts": 4}, ATTENTION),
}
QUICK = ("glm4_moe", "qwen2_moe", "phimoe")


def model_folder(folder: Path, model_type: str, **settings: Any) -> Path:
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **settings})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def adapted(folder: Path, *targets: str) -> tuple[Fsdp2Config, transformers.PreTrainedModel]:
    lora = {"rank": 4, **({"target_modules": targets} if targets else {})}
    config = Fsdp2Config.model_validate({"backend": "fsdp2", "device": "cpu", "packing": False, "lora": lora})
    return config, load_model(config, folder, attention="eager")


def layers(model: torch.nn.Module) -> set[str]:
    """Return which layers have an adapter, without the number of their block."""
    return {name.split(".", 3)[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.fault(1, 7)
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
)
def test_all_linear_adapts_linear_layers_only_and_is_saved_as_the_plain_model(tmp_path: Path, family: str) -> None:
    settings, expected = FAMILIES[family]
    config, model = adapted(model_folder(tmp_path / "base", family, **settings))
    assert layers(model) == expected
    assert config.lora is not None
    exported = low_rank_exports(EngineWeights(model).exported(), config.lora)
    ModelFolderWriter(model).write(model, EngineWeights(model).full(exported, list(exported)), tmp_path / "saved")
    base, saved = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("base", "saved")
    )
    assert saved.keys() == base.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in base.items())
    model(torch.arange(3, 13)[None]).logits.sum().backward()  # every adapter is called, but for experts'
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lora_B" in name)


@pytest.mark.fault(7)
def test_layers_that_are_called_otherwise_are_left_out_and_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder(tmp_path / "phimoe", "phimoe", num_local_experts=4)
    adapted(folder)
    assert "all-linear leaves out router (a PhimoeTopKRouter, whose forward is its own)" in caplog.text
    with pytest.raises(ModelError, match=r"target_modules='router' cannot be adapted.*PhimoeTopKRouter"):
        adapted(folder, "router")
    folder = model_folder(tmp_path / "gpt2", "gpt2", n_layer=1, n_embd=32, n_head=2)
    with pytest.raises(ModelError, match=r"c_attn.*Conv1D, whose weight is transposed"):
        adapted(folder, "c_attn")
    with pytest.raises(ModelError, match=r"'all-linear' cannot be adapted.*Conv1D.*leave engine.lora out"):
        adapted(folder)
    folder = model_folder(tmp_path / "mamba", "mamba", state_size=4, time_step_rank=4)
    _, model = adapted(folder)
    assert layers(model) == {"mixer.in_proj"}
    with pytest.raises(ModelError, match=r"dt_proj .MambaMixer uses its weight without calling it"):
        adapted(folder, "dt_proj")


@pytest.mark.fault(7)
def test_a_forward_of_its_own_that_computes_a_linear_layer_is_adapted(tmp_path: Path) -> None:
    _, model = adapted(model_folder(tmp_path, "falcon", n_head=4))
    names = {"self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    assert layers(model) == names
    with torch.device("meta"):  # as on the ranks that read no weights
        lora = LoraConfig(rank=4)
        skeleton = transformers.AutoModelForCausalLM.from_config(model.config)
        inject_adapters(skeleton, lora, 0)
    assert layers(skeleton) == names


@pytest.mark.fault(1)
def test_what_experts_fuse_is_said_where_somebody_asks_for_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", "qwen3_moe", num_experts=4, head_dim=8)
    with pytest.raises(
        ModelError, match=r"'gate_proj' fits no linear layer.*fused in gate_up_proj, which is no linear"
    ):
        adapted(folder, "gate_proj")


@pytest.mark.fault(1)
def test_layers_of_one_name_that_experts_have_too_are_adapted_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder(tmp_path / "base", "glm4_moe", **FAMILIES["glm4_moe"][0])
    _, model = adapted(folder, "gate_proj")
    assert layers(model) == {"mlp.gate_proj", "mlp.shared_experts.gate_proj"}
    save_adapter(model, [], tmp_path / "adapter")
    assert "peft will not load this adapter as it is: for models of type glm4_moe it takes gate_proj" in caplog.text


@pytest.mark.fault(1)
def test_other_layers_than_asked_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "base", "qwen3", head_dim=8)
    inject = peft.inject_adapter_in_model

    def inject_elsewhere(config: Any, *args: Any, **settings: Any) -> Any:
        config.target_modules = {"k_proj"}
        return inject(config, *args, **settings)

    monkeypatch.setattr(peft, "inject_adapter_in_model", inject_elsewhere)
    with pytest.raises(ModelError, match=r"peft changed other layers.*k_proj.*in place of.*q_proj"):
        adapted(folder, "q_proj")
    monkeypatch.setattr(peft, "inject_adapter_in_model", lambda *_, **__: dict[str, Any]()["no such layer"])
    with pytest.raises(ModelError, match="peft cannot adapt Qwen3ForCausalLM: 'no such layer'"):
        adapted(folder, "q_proj")


@pytest.mark.fault(5)
def test_an_adapters_dropout_is_drawn_without_the_models(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "base", "qwen3", head_dim=8, attention_dropout=0.5)
    config = Fsdp2Config.model_validate({"device": "cpu", "packing": False, "lora": {"rank": 4, "dropout": 0.5}})
    model = load_model(config, folder, attention="eager")
    set_train_mode(model, training=True, dropout=False)
    drawing = {name: module for name, module in model.named_modules() if module.training}
    assert all(".lora_dropout" in name for name in drawing)
    dropouts = [module for module in drawing.values() if isinstance(module, torch.nn.Dropout)]
    assert len(dropouts) == 2 * 7
    assert {module.p for module in dropouts} == {0.5}


@pytest.mark.fault(1)
def test_a_folder_that_brings_an_adapter_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "qwen3", head_dim=8)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(folder))
    with pytest.raises(ModelError, match=r"holds an adapter beside the model .adapter_config.json"):
        load_model(Fsdp2Config(device="cpu"), folder, attention="eager")


WITHOUT = """
import sys
import verl_fsdp.hooks, verl_fsdp.fsdp2.build
print("peft" in sys.modules)
sys.modules["peft"] = None
from verl_fsdp.model.lora import import_peft
import_peft()
"""


def test_peft_is_imported_by_whoever_asks_for_adapters_only() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert run.stdout == "False\n"
    assert run.stderr.rstrip().endswith("install it with: pip install peft")
