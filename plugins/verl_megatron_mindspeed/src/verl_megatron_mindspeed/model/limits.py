"""What can be run: the kinds of models that are proven, and how they may be divided."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedConfig

from verl_engine.contract.bounded import divisors
from verl_engine.contract.errors import ConfigError, ModelError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.hf_config import read_rotary

PROVEN: Final = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose logits our tests compare with those of transformers."""
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The numbers of llama3's rotary positions that Megatron has fixed."""
_OF_STAGES: Final = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_ADVICE_FOR_STAGES: Final = f", or give {' and '.join(_OF_STAGES)} in engine.transformer_options"


def check_model(config: MegatronConfig, hf_config: PreTrainedConfig, folder: Path) -> None:
    """Raise ModelError where Megatron's model would not be the folder's, ConfigError where it cannot be divided so."""
    if hf_config.model_type not in PROVEN:
        raise ModelError(
            f"model folder {folder} holds a model of type {hf_config.model_type!r}, and Megatron's model is proven to "
            f"compute the same for {', '.join(PROVEN)} only; take a model of these types, or another backend, such as "
            "fsdp2"
        )
    for problem in _differences(hf_config):
        raise ModelError(f"model folder {folder}: {problem}; take another model, or another backend, such as fsdp2")
    _check_division(config, hf_config)
    if getattr(hf_config, "num_experts_per_tok", None):
        _check_experts(config, hf_config)
    else:
        _check_no_experts(config, hf_config)


def _differences(hf_config: PreTrainedConfig) -> list[str]:
    """Say what of the model Megatron would compute otherwise, or not at all."""
    get = partial(getattr, hf_config)
    layer_types, windows = get("layer_types", None), get("use_sliding_window", False) and hf_config.sliding_window
    is_windowed = any(kind != "full_attention" for kind in layer_types) if layer_types else windows
    is_mixed = list(get("mlp_only_layers", None) or []) or get("decoder_sparse_step", 1) != 1
    turned = read_rotary(hf_config).settings.get("partial_rotary_factor") or get("partial_rotary_factor", None) or 1.0
    differences = {
        f"hidden_act={hf_config.hidden_act!r}, and the engine computes 'silu' only": hf_config.hidden_act != "silu",
        "it has sliding windows, and the engine computes full attention only": is_windowed,
        "attention_bias=true, and the engine has no bias after attention": get("attention_bias", False),
        "qkv_bias=false, and the engine has this bias": not get("qkv_bias", True),
        "mlp_bias=true, and the engine has no bias there": get("mlp_bias", False),
        f"partial_rotary_factor={turned}, and the engine turns whole heads only": turned != 1.0,
        "some of its layers have experts and some have not; the engine runs models whose layers are alike": is_mixed,
    }
    return [*(what for what, is_so in differences.items() if is_so), *_rotary_difference(hf_config)]


def _rotary_difference(hf_config: PreTrainedConfig) -> list[str]:
    rotary = read_rotary(hf_config)
    if rotary.kind == "default":
        return []
    if rotary.kind != "llama3":
        return [f"rope_type={rotary.kind!r}; the engine computes 'default' and 'llama3' only"]
    given = {name: rotary.settings.get(name) for name in _LLAMA3}
    if given != _LLAMA3:
        return [f"rope_type='llama3' with {given}; Megatron has fixed {_LLAMA3}"]
    return []


def _check_division(config: MegatronConfig, hf_config: PreTrainedConfig) -> None:
    tensor, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    parts = stages * config.virtual_pipeline_parallel_size
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        _divides("tensor_parallel_size", tensor, name, getattr(hf_config, name))
    num_layers = hf_config.num_hidden_layers
    options = config.transformer_options
    given = {name: options[name] for name in _OF_STAGES if options.get(name) is not None}
    if given:
        sizes = _uneven_stages(given, stages, num_layers)
        _divides_stages("virtual_pipeline_parallel_size", config.virtual_pipeline_parallel_size, sizes)
    else:
        name = "pipeline_parallel_size" + " * virtual_pipeline_parallel_size" * (parts != stages)
        _divides(name, parts, "num_hidden_layers", num_layers, _ADVICE_FOR_STAGES)
        sizes = [num_layers // stages]
    if config.recompute == "full" and config.recompute_method == "uniform":
        in_parts = [size // config.virtual_pipeline_parallel_size for size in sizes]
        _divides_stages("recompute_num_layers", config.recompute_num_layers, in_parts)


def _uneven_stages(given: dict[str, Any], stages: int, num_layers: int) -> list[int]:
    """Return how many layers pipeline stages have, where the first or last are to have another number."""
    for name, size in given.items():
        if stages == 1 or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"engine.transformer_options.{name}={size!r} must be a number of layers above 0, with "
                f"engine.pipeline_parallel_size of 2 or more (it is {stages})"
            )
    rest, others = num_layers - sum(given.values()), stages - len(given)
    if rest < others or (rest % others if others else rest):
        raise ConfigError(
            f"engine.transformer_options: {', '.join(f'{name}={size}' for name, size in given.items())} leaves {rest} "
            f"of the model's num_hidden_layers={num_layers} to {others} pipeline stages, which are to have the same "
            "number of layers each"
        )
    return [*given.values(), *([rest // others] if others else [])]


def _check_experts(config: MegatronConfig, hf_config: PreTrainedConfig) -> None:
    _divides("expert_parallel_size", config.expert_parallel_size, "num_experts", hf_config.num_experts)
    _divides(
        "expert_tensor_parallel_size",
        config.expert_tensor_ranks,
        "moe_intermediate_size",
        hf_config.moe_intermediate_size,
    )
    if config.tensor_parallel_size > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"engine.tensor_parallel_size={config.tensor_parallel_size} with a mixture of experts needs "
            "engine.sequence_parallel=true: Megatron's experts would see every token once for each rank"
        )


def _check_no_experts(config: MegatronConfig, hf_config: PreTrainedConfig) -> None:
    for name in ("expert_parallel_size", "expert_tensor_parallel_size"):
        value = getattr(config, name)
        if value not in (None, 1):
            raise ConfigError(
                f"engine.{name}={value} is for mixtures of experts, and model type {hf_config.model_type!r} has none; "
                "leave it out"
            )


def _divides_stages(name: str, value: int, sizes: Iterable[int]) -> None:
    for size in sizes:
        _divides(name, value, "layers of each pipeline part", size)


def _divides(name: str, value: int, what: str, number: int, advice: str = "") -> None:
    if number % value:
        raise ConfigError(
            f"engine.{name}={value} does not divide the model's {what}={number}; use one of {divisors(number)}{advice}"
        )
