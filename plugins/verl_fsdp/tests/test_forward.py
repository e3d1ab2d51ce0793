"""Log-probs: packed and padded micro-batches say what each sequence alone says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from verl_engine.contract.errors import ModelError
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.sequence import Sequence
    from verl_engine.testing.rank_pools import OnRanks

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "qwen3": transformers.Qwen3Config(**TINY, head_dim=8),
    "qwen2_sliding": transformers.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "llama_tied": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=3, head_dim=8),
    "gemma3": transformers.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=4),
    "gemma2": transformers.Gemma2Config(**TINY, head_dim=8, sliding_window=4, attn_logit_softcapping=0.5),
    "gpt_oss": transformers.GptOssConfig(
        **TINY, head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "qwen3_5": transformers.Qwen3_5TextConfig(
        **TINY,
        head_dim=8,
        layer_types=["full_attention"] * 2,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]
        },
    ),
}  # fmt: skip


def write_model(folder: Path, kind: str) -> Path:
    """Write a tiny model of a kind, with weights large enough that attention matters."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    return folder


def log_probs(_rank: int, folder: Path, sequences: list[Sequence], packing: bool) -> list[torch.Tensor]:
    """Return each sequence's log-probs from one micro-batch."""
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", "packing": packing}
    return Driver(section, folder, rank=0, world_size=1).infer(sequences)


@pytest.mark.dist
@pytest.mark.fault(2, 8)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_log_probs_equal_those_of_each_sequence_alone(
    tmp_path: Path, kind: str, packing: bool, on_ranks: OnRanks
) -> None:
    folder = write_model(tmp_path / kind, kind)
    sequences = make_sequences(9)
    (found,) = on_ranks(log_probs, folder, sequences, packing, world_size=1)
    model = load_reference(folder)
    for sequence, part in zip(sequences, found, strict=True):
        torch.testing.assert_close(part, masked_log_probs(model, sequence), rtol=0, atol=5e-6)


@pytest.mark.dist
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_positions_may_have_several_axes_where_those_of_the_model_have(
    tmp_path: Path, packing: bool, on_ranks: OnRanks
) -> None:
    folder = write_model(tmp_path / "axes", "qwen3_5")
    random = np.random.default_rng(4)
    sequences = [
        dataclasses.replace(sequence, positions=random.integers(0, 30, (3, len(sequence))))
        for sequence in make_sequences(5)
    ]
    (found,) = on_ranks(log_probs, folder, sequences, packing, world_size=1)
    model = load_reference(folder)
    for sequence, part in zip(sequences, found, strict=True):
        torch.testing.assert_close(part, masked_log_probs(OneRow(model), sequence), rtol=0, atol=5e-6)


class OneRow:
    """Calls a model with positions [axes, 1, L]; the kit's reference gives [1, axes, L]."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, position_ids: torch.Tensor, **inputs: Any) -> Any:
        return self._model(position_ids=position_ids[0].unsqueeze(1), **inputs)


def refused_axes(_rank: int, folder: Path) -> str:
    positions = np.zeros((3, len(make_sequences(1)[0])), np.int64)
    try:
        log_probs(0, folder, [dataclasses.replace(make_sequences(1)[0], positions=positions)], packing=True)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_positions_of_several_axes_are_refused_where_the_model_has_one(tmp_path: Path, on_ranks: OnRanks) -> None:
    (message,) = on_ranks(refused_axes, write_model(tmp_path / "model", "qwen3"), world_size=1)
    assert message == "sequences have positions of 3 axes, and those of Qwen3ForCausalLM have one"


@pytest.mark.parametrize("content", ["nothing", "garbage"])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, content: str) -> None:
    from verl_fsdp.config import Fsdp2Config
    from verl_fsdp.model.loading import load_model

    if content == "garbage":
        (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="does not hold a causal LM that transformers can load"):
        load_model(Fsdp2Config(learning_rate=1e-3), tmp_path)
