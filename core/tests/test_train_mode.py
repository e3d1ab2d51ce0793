"""Training without dropout: the model computes what it does in eval mode, whatever draws noise in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from verl_engine.engine.train_mode import set_train_mode

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    # Layers that draw by themselves: the very ones that are recomputed in train mode.
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.3},
    "qwen3": {"intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2, "attention_dropout": 0.5},
    # No dropout at all, but jitter in the routers.
    "mixtral": {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "router_jitter_noise": 0.5},
    "phimoe": {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4, "router_jitter_noise": 0.5},
}
IDS = torch.arange(3, 23)[None]


@pytest.mark.fault(5)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_no_noise_is_drawn_unless_asked_for(kind: str, recompute: bool) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    set_train_mode(model, training=False, dropout=False)
    expected = model(IDS, use_cache=False).logits
    set_train_mode(model, training=True, dropout=True)
    assert not torch.equal(model(IDS, use_cache=False).logits, expected)
    set_train_mode(model, training=True, dropout=False)
    found = model(IDS, use_cache=False).logits
    assert torch.equal(found, expected)
    if recompute:
        inside = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
        assert inside
        assert all(module.training for module in inside)
    found.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "q_proj" in name)
