"""Small Hugging Face folders of each kind of model that the backend runs, and what tests do with them on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

from plugins.verl_megatron_mindspeed.tests.engines import forget_groups
from verl_engine.engine.device import Device
from verl_engine.testing.tiny_models import tiny_config
from verl_megatron_mindspeed.config import MegatronConfig

if TYPE_CHECKING:
    from pathlib import Path

    from megatron.core.packed_seq_params import PackedSeqParams

    from verl_megatron_mindspeed.model.build import MegatronModel

VOCABULARY: Final = 33  # two ranks do not divide it
LENGTHS: Final = (7, 7, 3, 1, 40)
LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NORMED: Final = {**_EXPERTS, "norm_topk_prob": True}
_RAW: Final = {**_EXPERTS, "norm_topk_prob": False}
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with stretched positions": ("LlamaConfig", {"rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"head_dim": None}),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_RAW, "shared_expert_intermediate_size": 24}),
    "qwen2_moe, normed": ("Qwen2MoeConfig", {**_NORMED, "shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3, tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", _NORMED),
    "qwen3_moe, not normed": ("Qwen3MoeConfig", _RAW),
    "qwen3_moe, tied": ("Qwen3MoeConfig", {**_NORMED, "tie_word_embeddings": True}),
}
"""Name to transformers' config class, and what it is given besides `tiny_config`."""


def family_config(family: str, **changes: Any) -> Any:
    """Make transformers' config of a family."""
    class_name, fields = FAMILIES[family]
    given = {**tiny_config(VOCABULARY), **fields, **changes}
    if given["head_dim"] is None:  # a real Qwen2 says nothing of it
        del given["head_dim"]
    return getattr(transformers, class_name)(**given)


def write_family(folder: Path, family: str, **changes: Any) -> Path:
    """Write a model of a family; its weights are large enough for mistakes to show."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(family_config(family, **changes))
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.2)
        model.save_pretrained(folder)
    return folder


def build(folder: Path, **fields: Any) -> MegatronModel:
    """Build this rank's part of a folder's model and read its weights; it may be divided otherwise than one before."""
    from verl_megatron_mindspeed import parallel
    from verl_megatron_mindspeed.model.build import build_model
    from verl_megatron_mindspeed.weights.weight_map import WeightMap

    config = MegatronConfig(device="cpu", **fields)
    forget_groups()
    groups, device = parallel.build_groups(config), Device.resolve("cpu", 0)
    parallel._exchange(groups.state)  # for good: there is no engine that would do it for each call
    model = build_model(config, folder, groups, device)
    WeightMap(model, groups, device).load_folder(folder)
    return model


def tokens(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Draw packed sequences, [T] int64."""
    return torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1))


def places(lengths: tuple[int, ...]) -> PackedSeqParams:
    """Say where sequences lie, as Megatron wants it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def run(model: MegatronModel, ids: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Run a model that is whole on this rank; return [T, vocabulary] or [T, 1]."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    output: torch.Tensor = model.chunks[0](ids[None], positions[None], None, packed_seq_params=places(lengths))
    return output[0]


def plain(model: Any, ids: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Run transformers' model on one sequence after the other."""
    with torch.no_grad():
        return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)])
