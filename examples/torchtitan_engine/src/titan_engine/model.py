"""torchtitan's Qwen3, as a Hugging Face folder describes it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from verl_engine import ModelError

LOADED = {"weight": skip_param_init}
RUNS = {"model_type": "qwen3", "rope_type": "default", "hidden_act": "silu", "use_sliding_window": False}
"""What a config has to say, where it says something of it."""


def build_model(config: Mapping[str, Any] | None, folder: Path) -> Qwen3Model:
    """Build the model without memory for its weights (on torch's device ``meta``)."""
    if config is None:
        raise ModelError(f"{folder} has no config.json that can be read")
    rope = config.get("rope_parameters") or {**config, **(config.get("rope_scaling") or {})}
    for name, allowed in RUNS.items():
        if (value := {**config, **rope}.get(name, allowed)) != allowed:
            raise ModelError(f"{folder}: config.json has {name}={value!r}, and titan_engine runs only {allowed!r}")
    try:
        described = _describe(config, rope["rope_theta"])
    except KeyError as error:
        raise ModelError(f"{folder}: config.json has no {error.args[0]}") from error
    with torch.device("meta"):
        model = described.build()
    blocks = list(model.layers.values())
    for block in blocks[1:]:
        block.attention.rope = blocks[0].attention.rope  # one table of positions for all layers
    return model


def _describe(config: Mapping[str, Any], theta: float) -> Qwen3Model.Config:
    dim, head_dim, vocab_size = config["hidden_size"], config["head_dim"], config["vocab_size"]

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=config["rms_norm_eps"], param_init=LOADED)

    def block() -> Qwen3TransformerBlock.Config:
        attention = make_gqa_config(
            dim=dim,
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            wqkv_param_init=LOADED,
            wo_param_init=LOADED,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=config["max_position_embeddings"], theta=theta),
            qk_norm=norm(head_dim),
        )
        feed_forward = make_ffn_config(
            dim=dim, hidden_dim=config["intermediate_size"], w1_param_init=LOADED, w2w3_param_init=LOADED
        )
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim), ffn_norm=norm(dim), attention=attention, feed_forward=feed_forward
        )

    return Qwen3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        norm=norm(dim),
        enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=LOADED),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=LOADED),
        layers=[block() for _ in range(config["num_hidden_layers"])],
    )


def hugging_face_names(model: Qwen3Model) -> Callable[[str], str]:
    """Return what gives the Hugging Face name of a parameter; buffers keep theirs."""
    adapter = Qwen3StateDictAdapter(model.config, None)
    return lambda name: next(iter(adapter.to_hf({name: None})), name)


def read_weights(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a folder, one by one."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt", str(device)) as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
